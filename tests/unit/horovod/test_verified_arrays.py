"""Arrays of a training under `farandole verify`: nests, hashes, labels, and the seeds of ranks."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from farandole.horovod.verify.arrays import as_torch, digest_of, leaves_of, replaced, unique_labels
from farandole.train.seed import rank_seed
from farandole.train.verify.verify import fingerprint

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
def test_a_nest_is_taken_apart_and_put_together(nest: Any) -> None:
    leaves = leaves_of(nest)
    assert None not in leaves
    assert replaced(nest, iter(leaves)) == nest
    doubled = replaced(nest, iter([each * 2 for each in leaves]))
    assert leaves_of(doubled) == [each * 2 for each in leaves]
    assert type(doubled) is type(nest)


def test_a_hash_tells_values_shapes_and_types_apart() -> None:
    plain = np.arange(6, dtype=np.float32)
    others: list[Any] = [plain + 1, plain.reshape(2, 3), plain.astype(np.float64), plain[:5]]
    assert digest_of([plain]) == digest_of([plain.copy()])
    assert len({digest_of([each]) for each in [plain, *others]}) == 5
    assert digest_of([np.array([b"a", b"b"], dtype=object)]) != digest_of([np.array([b"a", b"c"], dtype=object)])
    assert digest_of([plain], 3) == digest_of([np.array([0, 1, 2, 9, 9, 9], dtype=np.float32)], 3)
    assert digest_of([plain, plain]) != digest_of([plain])


def test_bits_of_arrays_are_compared_by_torch() -> None:
    for dtype in (np.float16, np.float32, np.float64, np.int8, np.bool_, np.uint32):
        array = np.arange(4).astype(dtype)
        assert as_torch(array).numel() == 4, dtype
        assert fingerprint(as_torch(array)) == fingerprint(as_torch(array.copy()))
        assert fingerprint(as_torch(array)) != fingerprint(as_torch(array[::-1]))
    assert as_torch(np.zeros((0, 3), np.float32)).numel() == 0


def test_labels_become_unique() -> None:
    assert unique_labels(["a", "b", "a", "a"]) == ["a", "b", "a (2)", "a (3)"]


def test_seeds_of_ranks() -> None:
    assert rank_seed(7, 0) == 7, "rank 0 draws what one process draws"
    found = {rank_seed(seed, rank) % 2**31 for seed in range(20) for rank in range(1, 20)}
    assert len(found) == 380
