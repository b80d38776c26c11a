"""Random values that states may have, and a comparison to the last bit."""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from farandole.checkpoint.shard_file import ITEM_BYTES

TYPES = [getattr(torch, name) for name in sorted(ITEM_BYTES)]
PLAIN = [
    None, True, 0, -3, 2**70, 1.5, math.inf, math.nan, -0.0, 5e-324, "x", "ü\n", b"\0\xff", 1 + 2j,
    torch.float16, torch.Size([1, 2]),
]  # fmt: skip
KEYS = ["a", "b", "a/b", "$x", "", "é", 1, "1", (1, 2), None, 1.5, True]
DEEPEST = 3


def draw_tensor(dice: random.Random) -> torch.Tensor:
    """Return a tensor of any type, shape and place in memory, also without elements; its bits are random."""
    dtype = dice.choice(TYPES)
    shape = [dice.choice([0, 1, 2, 3, 5, 7]) for _ in range(dice.randint(0, 3))]
    count = math.prod(shape)
    top = 1 if dtype == torch.bool else 255
    content = bytearray(dice.getrandbits(8) & top for _ in range(max(1, count) * dtype.itemsize))
    tensor = torch.frombuffer(content, dtype=dtype)[:count].reshape(shape)
    form = dice.randrange(6)
    if form == 0 and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if form == 1 and tensor.dim() and shape[0] > 1:
        return tensor[::2]
    if form == 2 and tensor.dim() and shape[0]:
        return tensor[:1].expand(3, *shape[1:])
    return tensor


def draw_value(dice: random.Random, depth: int = 0) -> Any:
    """Return a tensor, a number, a text, or a container of values."""
    form = dice.randrange(12) if depth < DEEPEST else dice.randrange(7)
    if form < 4:
        return draw_tensor(dice)
    if form == 4:
        return dice.choice(PLAIN)
    if form == 5:
        kind = dice.choice(["f4", "f8", "i8", "u1", "?", "c16", "<i2", ">i4"])
        return np.array([dice.random() for _ in range(dice.randint(0, 3))], kind)
    if form == 6:
        return np.dtype(dice.choice(["f4", "i8", "?", "f2"])).type(dice.randint(0, 1))
    count = dice.randint(0, 3)
    if form < 10:
        return {key: draw_value(dice, depth + 1) for key in dice.sample(KEYS, count)}
    values = [draw_value(dice, depth + 1) for _ in range(count)]
    return dice.choice([list, tuple, collections.deque])(values)


def difference(one: Any, other: Any, path: str = "") -> str:
    """Return where two values differ; nothing where they are the same to the last bit, by type and order."""
    if type(one) is not type(other):
        return f"{path}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, torch.Tensor):
        is_like = one.dtype == other.dtype and one.shape == other.shape
        return "" if is_like and bits_of(one) == bits_of(other) else f"{path}: {one} and {other}"
    if isinstance(one, (np.ndarray, np.generic)):
        is_like = one.dtype.newbyteorder("=") == other.dtype.newbyteorder("=") and one.shape == other.shape
        same = is_like and one.astype(one.dtype.newbyteorder("=")).tobytes() == other.tobytes()
        return "" if same else f"{path}: {one!r} and {other!r}"
    if isinstance(one, dict):
        if [(type(key), key) for key in one] != [(type(key), key) for key in other]:
            return f"{path}: keys {list(one)} and {list(other)}"
        return next(_differences([(one[key], other[key], f"{path}/{key!r}") for key in one]), "")
    if isinstance(one, (list, tuple, collections.deque)):
        if len(one) != len(other):
            return f"{path}: {len(one)} and {len(other)} values"
        pairs = enumerate(zip(one, other, strict=True))
        return next(_differences([(a, b, f"{path}/{place}") for place, (a, b) in pairs]), "")
    return "" if repr(one) == repr(other) else f"{path}: {one!r} and {other!r}"


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements in their order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(plain.numel(), dtype=plain.dtype)
    flat.view(plain.shape).copy_(plain)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _differences(pairs: list[tuple[Any, Any, str]]) -> Iterator[str]:
    return (found for pair in pairs if (found := difference(*pair)))
