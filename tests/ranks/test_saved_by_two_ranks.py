"""Ranks of one host that write one file by ``torch.save`` are told so, once."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch

import farandole as fd
from tests.ranks.pool import ranks


def said_while_saving(directory: Path, name: str) -> list[str]:
    """Save twice under `name`, which may hold the rank, then on rank 0 alone; return what each rank said."""
    here = fd.init(run_dir=directory / "run", progress=False)
    heard = io.StringIO()
    with redirect_stderr(heard):
        for _ in range(2):
            torch.save([1], directory / name.format(here.rank))
        if here.is_main:
            torch.save([1], str(directory / "main.pt"))
            torch.save([1], f=io.BytesIO())
    said: list[str] = fd.gather(heard.getvalue())
    fd.shutdown()
    return said


@ranks(3)
def test_a_file_that_several_ranks_write_is_named_once_with_the_remedy(tmp_path: Path) -> None:
    said = [text for text in said_while_saving(tmp_path, "ckpt.pt") if text]
    assert len(said) == 1, said
    assert said[0].count("\n") == 1
    assert f"have written {tmp_path / 'ckpt.pt'} with torch.save" in said[0]
    assert "if farandole.world().is_main: torch.save(...)" in said[0]


@ranks(2)
def test_files_of_each_rank_and_files_of_one_are_not_remarked_upon(tmp_path: Path) -> None:
    assert not any(said_while_saving(tmp_path, "ckpt_{}.pt"))
    assert not any(said_while_saving(tmp_path, "/dev/null"))
