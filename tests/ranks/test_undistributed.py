"""Ranks that train without `fd.distribute` are told so, and only they."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import farandole as fd
from tests.ranks.pool import ranks


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@pytest.mark.full("busy")
@pytest.mark.parametrize("kind", ["forgotten", "distributed", "divided", "wrapped", "reference", "never"])
@ranks(2)
def test_who_forgot_to_distribute_is_told_at_the_first_step_and_at_the_end(kind: str) -> None:
    import contextlib
    import io
    import sys
    import tempfile
    from pathlib import Path
    from unittest import mock

    said = io.StringIO()
    script = Path(tempfile.mkdtemp()) / "train.py"
    script.write_text("fd.distribute(model, optimizer)" if kind in ("reference", "never") else "train()")
    main = mock.patch.object(sys.modules["__main__"], "__file__", str(script), create=True)
    with main, contextlib.redirect_stderr(said):
        world = fd.init(progress=False)
        if kind == "reference":
            other = nn.Linear(3, 3)
            _train(other, torch.optim.SGD(other.parameters(), 0.1))
        model: nn.Module = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if kind in ("distributed", "divided", "reference"):
            fd.distribute(model, optimizer, fd.Plan(zero=1 if kind == "divided" else 0))
        if kind == "wrapped":
            model = nn.parallel.DistributedDataParallel(model)
        _train(model, optimizer)
        if kind == "wrapped":
            del model
        fd.shutdown()
    lines = [line for line in said.getvalue().splitlines() if "no model was distributed" in line]
    told = {"forgotten": 2, "never": 1}.get(kind, 0) if world.rank == 0 else 0
    assert len(lines) == told, said.getvalue()
    if told:
        assert "each of the 2 ranks trains one of its own" in lines[0]
        assert lines[-1].startswith("farandole: at the end: ")
