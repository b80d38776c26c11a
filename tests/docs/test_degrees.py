"""What docs/fit/one-model.md says of keys and degrees together is what the table of rules refuses, no more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.rules import broken
from farandole.core.vocabulary.spec import Plan

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fit/one-model.md"
VALUES: dict[str, dict[str, Any]] = {
    "zero = 1": {"zero": 1, "shard": 2},
    "2": {"zero": 2, "shard": 2},
    "zero = 3": {"zero": 3, "shard": 2},
    'precision = "bf16"': {"precision": "bf16"},
    'precision = "fp16"': {"precision": "fp16"},
    "clip_norm": {"clip_norm": 1.0},
    "sync_batch_norm": {"sync_batch_norm": True},
    "accumulate": {"accumulate": 2},
    "weight_versions = 2": {"weight_versions": 2},
    "train_schedule": {"train_schedule": {"0": "head", "10": "all"}},
    'shard_within = "host"': {"shard_within": "host", "zero": 3, "shard": 2},
    "bf16_parameters": {"bf16_parameters": True},
    'offload = "disk"': {"offload": "disk"},
}
"""What the words of the first column set."""
NO_KEY = ("clip_grad_norm_", "padding in the batch")


def cells() -> Iterator[tuple[str, str, str]]:
    """Return the words of a row's begin, a degree, and what the page says of both."""
    table = PAGE.read_text().split("| with |")[1].split("\n\n")[0]
    head, _, *rows = table.splitlines()
    degrees = re.findall(r"`(\w+)` above 1", head)
    assert len(degrees) == 4
    for row in rows:
        first, *said = [cell.strip() for cell in row.strip("|").split("|")]
        for words in re.findall(r"`([^`]+)`", first) or [first]:
            for degree, each in zip(degrees, said, strict=True):
                if words not in NO_KEY:
                    yield words, degree, each


@pytest.mark.parametrize(("words", "degree", "said"), [*cells()])
def test_a_cell_says_no_where_a_rule_refuses(words: str, degree: str, said: str) -> None:
    values = {**vars(Plan()), **VALUES[words], degree: 2}
    rule = broken(values)
    assert (rule is not None) == said.startswith("no"), (values, rule)
