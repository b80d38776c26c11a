"""Arrays of a training under `farandole verify`: nests, hashes, and the seeds of ranks."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from farandole.horovod.array_verification import digest_of, leaves_of
from farandole.train.loop import rank_seed

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "nest",
    [
        1,
        (1, 2, None),
        {"b": 1, "a": [2, (3, None)]},
        (Pair(1, {"y": 2, "x": 3}), [], 4),
        None,
    ],
)
def test_leaves_of_a_nest(nest: Any) -> None:
    leaves = leaves_of(nest)
    assert sorted(leaves) == list(range(1, len(leaves) + 1)), "each once, None is none"


def test_a_hash_tells_values_shapes_and_types_apart() -> None:
    plain = np.arange(6, dtype=np.float32)
    others: list[Any] = [plain + 1, plain.reshape(2, 3), plain.astype(np.float64), plain[:5]]
    assert digest_of([plain]) == digest_of([plain.copy()])
    assert len({digest_of([each]) for each in [plain, *others]}) == 5
    assert digest_of([np.array([b"a", b"b"], dtype=object)]) != digest_of([np.array([b"a", b"c"], dtype=object)])
    assert digest_of([plain], 3) == digest_of([np.array([0, 1, 2, 9, 9, 9], dtype=np.float32)], 3)
    assert digest_of([plain, plain]) != digest_of([plain])


def test_seeds_of_ranks() -> None:
    assert rank_seed(7, 0) == 7, "rank 0 draws what one process draws"
    found = {rank_seed(seed, rank) % 2**31 for seed in range(20) for rank in range(1, 20)}
    assert len(found) == 380
