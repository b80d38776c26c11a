"""Training by each codec ends where training by exact gradients ends.

A byte-level model of the text of Python's own standard library, four pretend ranks in lock step, a thousand
steps. Matrices travel by the codec, biases exactly, as the reducer has it. Everything is seeded: the figures
are the same on every run on one machine, and differ by rounding on another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from farandole.bench.data import load_text
from farandole.comm.codecs.registry import make_codec
from farandole.comm.codecs.units import fuse
from farandole.comm.messages import Encoded, Encoding, GroupRank, simulate
from farandole.core.vocabulary.codec_spec import OPTIONS, CodecSpec

RANKS, STEPS, BATCH, CONTEXT = 4, 1000, 16, 4
SYMBOLS, WIDTH, HIDDEN = 64, 8, 48
SHAPES = [(SYMBOLS, WIDTH), (CONTEXT * WIDTH, HIDDEN), (HIDDEN, SYMBOLS)]

BOUNDS = {
    "fp16": 0.01, "bf16": 0.01, "int8": 0.01, "fp8": 0.01, "int4": 0.03, "sign": 0.10,
    "topk:0.05,warmup_steps=200": 0.10, "threshold:0.01": 0.10, "randomk:0.2": 0.10, "powersgd:4": 0.10,
}  # fmt: skip
"""How much larger the loss may be at the end, on text that was not trained on."""


def test_every_codec_is_tested() -> None:
    assert {CodecSpec.parse(text).name for text in BOUNDS} == set(OPTIONS) - {"none"}


@functools.cache
def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text as small numbers, CONTEXT + 1 to a row: for training, and 4096 rows for validation."""
    parts = []
    for data in load_text(context=CONTEXT, limit_bytes=200_000):
        rows = torch.stack([torch.cat([data[i][0], data[i][1][-1:]]) for i in range(min(len(data), 8000))])
        parts.append(rows % SYMBOLS)  # folds capitals onto small letters and so on: still text
    return parts[0], parts[1][:4096]


def forward(parameters: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return the loss of `rows` (ranks, batch, CONTEXT + 1), given parameters with a dimension of ranks before.

    One pass then gives the gradient of every rank.
    """
    embedding, weight, bias, out, out_bias = parameters
    ranks, batch, _ = rows.shape
    one_hot = functional.one_hot(rows[..., :-1].reshape(ranks, -1), SYMBOLS).to(torch.float32)
    seen = torch.bmm(one_hot, embedding).view(ranks, batch, -1)
    hidden = torch.tanh(torch.baddbmm(bias, seen, weight))
    guesses = torch.baddbmm(out_bias, hidden, out)
    return functional.cross_entropy(guesses.flatten(0, 1), rows[..., -1].flatten())


def initial() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    embedding, weight, out = (torch.randn(shape, generator=generator) / math.sqrt(shape[0]) for shape in SHAPES)
    return [embedding * 8, weight, torch.zeros(1, HIDDEN), out, torch.zeros(1, SYMBOLS)]


def coded_mean(codec_text: str, gradients: list[torch.Tensor], states: list[list[Any]]) -> list[torch.Tensor]:
    """Return the mean of `gradients` (ranks, rows, columns) of the three matrices, by the codec."""
    made = make_codec(CodecSpec.parse(codec_text))

    def begin(rank: int, units: list[torch.Tensor]) -> list[Any]:
        states[rank] = states[rank] or [made.init(unit, GroupRank(rank, RANKS)) for unit in units]
        return states[rank]

    def segment(rank: int) -> Encoding:
        joined = torch.cat([gradient[rank].reshape(-1) for gradient in gradients])
        state = begin(rank, [joined])[0]
        mean, own, state = yield from made.encode(joined, state, GroupRank(rank, RANKS))
        return Encoded(mean, own, [state])

    def matrices(rank: int) -> Encoding:
        seat = GroupRank(rank, RANKS)
        units = [gradient[rank].clone() for gradient in gradients]
        kept = begin(rank, units)
        results = yield from fuse([made.encode(g, s, seat) for g, s in zip(units, kept, strict=True)])
        joined = torch.cat([mean.reshape(-1) for mean, _, _ in results])
        return Encoded(joined, joined, [state for _, _, state in results])

    one = segment if made.granularity == "segment" else matrices
    together = simulate([one(rank) for rank in range(RANKS)])
    states[:] = together.states
    mean = together.means[0]
    sizes = [rows * columns for rows, columns in SHAPES]
    return [part.view(shape) for part, shape in zip(mean.split(sizes), SHAPES, strict=True)]


@functools.cache
def loss_after_training(codec: str) -> float:
    """Train; return the loss on the validation text."""
    training, validation = windows()
    parameters = initial()
    velocity = [torch.zeros_like(parameter) for parameter in parameters]
    states: list[list[Any]] = [[] for _ in range(RANKS)]
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        rows = training[torch.randint(len(training), (RANKS, BATCH), generator=generator)]
        spread = [p.expand(RANKS, *p.shape).clone().requires_grad_() for p in parameters]
        loss = forward(spread, rows) * RANKS
        gradients = list(torch.autograd.grad(loss, spread))
        means = [gradient.mean(0) for gradient in gradients]
        if codec != "none":
            matrices = [0, 1, 3]
            coded = coded_mean(codec, [gradients[i] for i in matrices], states)
            for i, mean in zip(matrices, coded, strict=True):
                means[i] = mean
        rate = 0.1 * min(1.0, 2 * (1 - step / STEPS))
        torch._foreach_mul_(velocity, 0.9)
        torch._foreach_add_(velocity, means)
        torch._foreach_add_(parameters, velocity, alpha=-rate)
    with torch.no_grad():
        return float(forward([parameter.unsqueeze(0) for parameter in parameters], validation.unsqueeze(0)))


@pytest.mark.full("further")
def test_exact_training_learns() -> None:
    training, validation = windows()
    counts = torch.bincount(training[:, -1], minlength=SYMBOLS) + 1.0
    frequencies = -float((counts / counts.sum()).log()[validation[:, -1]].mean())
    assert loss_after_training("none") < 0.9 * frequencies, "better than knowing how often each letter comes"


@pytest.mark.full("further")
@pytest.mark.parametrize("codec", list(BOUNDS))
def test_training_by_a_codec_ends_where_exact_training_ends(codec: str) -> None:
    loss, exact = loss_after_training(codec), loss_after_training("none")
    assert loss <= exact * (1 + BOUNDS[codec]), f"{loss:.4f}, exact {exact:.4f}"
