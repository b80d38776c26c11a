"""Pieces that could be one pass over memory, beside the plain composition and `torch.compile`, on one core.

    python benchmarks/fused.py
    python benchmarks/fused.py --rounds 60 --only optimizer

`optimizer`: gradients are unscaled, clipped to a norm, and used by Adam. "plain" is three passes: a
multiplication, a norm with a multiplication (`clip_grad_norm_`), a step. "fused" computes the norm of the scaled
gradients and leaves the rest to torch's fused Adam, which divides by `grad_scale` as it reads a gradient.

`activation`: LayerNorm, GELU and dropout of a (tokens, width) tensor, forward and backward. "by pieces" does the
same for pieces of the rows that stay in the cache.

Prints the median of each in ms, its time over that of the plain one by neighbours in time with a 95 % bootstrap
interval, and the largest difference from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared import median_ms, paired, read_options, take_turns, timed

Case = dict[str, Callable[[], float]]
"""Each returns its seconds."""
SCALE, NORM = 1024.0, 1.0


def gradients_of(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def optimizer_case(layers: int, compiles: bool) -> tuple[Case, Callable[[], dict[str, float]]]:
    """Return ways to make a step of 3.2 million parameters a layer, and how their results differ."""
    shapes = [(512, 2048), (2048, 512), (1536, 512), (512, 512), (512,), (2048,)] * layers
    steps: Case = {}
    models: dict[str, list[nn.Parameter]] = {}

    def parameters_of(name: str) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        models[name] = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        for each in models[name]:
            each.grad = torch.randn(each.shape, generator=generator) * SCALE
        return models[name]

    def add(name: str, use: Callable[[list[nn.Parameter], Any], None], **options: Any) -> None:
        parameters = parameters_of(name)
        optimizer: Any = torch.optim.Adam(parameters, 1e-4, **options)
        given = [each.clone() for each in gradients_of(parameters)]

        def give() -> None:
            torch._foreach_copy_(gradients_of(parameters), given)

        steps[name] = timed(lambda: use(parameters, optimizer), before=give)

    def plain(parameters: list[nn.Parameter], optimizer: Any) -> None:
        torch._foreach_mul_(gradients_of(parameters), 1 / SCALE)
        nn.utils.clip_grad_norm_(parameters, NORM)
        optimizer.step()

    def fused(parameters: list[nn.Parameter], optimizer: Any) -> None:
        norms = torch._foreach_norm(gradients_of(parameters))
        norm = torch.linalg.vector_norm(torch.stack(norms)) / SCALE
        optimizer.grad_scale = SCALE / torch.clamp(NORM / (norm + 1e-6), max=1.0)
        optimizer.found_inf = (~torch.isfinite(norm)).float()
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf

    add("plain", plain)
    add("plain, fused Adam", plain, fused=True)
    add("fused", fused, fused=True)
    if compiles:
        add("torch.compile", torch.compile(plain))

    def differences() -> dict[str, float]:
        first = models["plain"]
        return {
            name: max(float((one - other).detach().abs().max()) for one, other in zip(first, others, strict=True))
            for name, others in models.items()
        }

    return steps, differences


def activation_case(_: int, compiles: bool) -> tuple[Case, Callable[[], dict[str, float]]]:
    """Return three ways of LayerNorm, GELU and dropout, and how their results differ (without dropout)."""
    tokens, width, chance = 4096, 1024, 0.1
    norm = nn.LayerNorm(width)
    x = torch.randn(tokens, width, requires_grad=True)
    upstream = torch.randn(tokens, width)

    def plain(rows: torch.Tensor, probability: float) -> torch.Tensor:
        return nn.functional.dropout(nn.functional.gelu(norm(rows)), probability)

    def by_pieces(rows: torch.Tensor, probability: float) -> torch.Tensor:
        return torch.cat([plain(piece, probability) for piece in rows.split(256)])

    ways = {"plain": plain, "by pieces": by_pieces}
    if compiles:
        ways["torch.compile"] = torch.compile(plain)

    def run(way: Callable[..., torch.Tensor]) -> Callable[[], float]:
        return timed(lambda: way(x, chance).backward(upstream), before=lambda: setattr(x, "grad", None))

    def differences() -> dict[str, float]:
        first = plain(x, 0.0)
        return {name: float((way(x, 0.0) - first).detach().abs().max()) for name, way in ways.items()}

    return {name: run(way) for name, way in ways.items()}, differences


CASES = {"optimizer": optimizer_case, "activation": activation_case}


def main() -> None:
    arguments = read_options(
        __doc__,
        rounds=40,
        only=(str, "one of the cases", sorted(CASES)),
        layers=(8, "of the optimizer's parameters"),
        eager=(False, "without torch.compile, which takes minutes here"),
    )
    torch.set_num_threads(1)
    for case in [arguments.only] if arguments.only else CASES:
        ways, differences = CASES[case](arguments.layers, not arguments.eager)
        seconds = take_turns(ways, arguments.rounds, warm_up=2)
        found = differences()
        for name, values in seconds.items():
            ratio, interval = paired(values, seconds["plain"])
            line = {"case": case, "way": name, "median_ms": median_ms(values, 2)}
            print(json.dumps({**line, "over_plain": ratio, "interval": interval, "differs_by": found[name]}))


if __name__ == "__main__":
    main()
