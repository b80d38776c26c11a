"""How much of an optimizer's time its fused and foreach forms save on the CPU, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/optimizer_forms.py

Printed is, for each class and size of tensors, the fraction of the plain form's time that the other form saves, by
medians of CPU time. `farandole diagnose` predicts from the least of them.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from shared import read_options, take_turns, timed

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], str]] = {
    "AdamW": (torch.optim.AdamW, {}, "fused"),
    "Adam": (torch.optim.Adam, {}, "fused"),
    "Adagrad": (torch.optim.Adagrad, {}, "fused"),
    "SGD": (torch.optim.SGD, {}, "fused"),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}, "fused"),
    "RMSprop": (torch.optim.RMSprop, {}, "foreach"),
}
SHAPES = ((600, 64), (600, 1024), (300, 4096), (100, 250_000))
"""Numbers of tensors, and their elements."""


def make(kind: type[torch.optim.Optimizer], options: dict[str, Any], tensors: int, elements: int) -> Any:
    """Return an optimizer of parameters that have gradients."""
    parameters = [torch.nn.Parameter(torch.randn(elements)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn(elements)
    return kind(parameters, lr=1e-3, **options)  # type: ignore[call-arg]


def main() -> None:
    rounds = read_options(__doc__, rounds=15).rounds
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, (kind, options, form) in CLASSES.items():
        for tensors, elements in SHAPES:
            forms = {"plain": make(kind, {**options, "foreach": False}, tensors, elements)}
            forms[form] = make(kind, {**options, form: True}, tensors, elements)
            steps = {each: timed(made.step, clock=time.process_time) for each, made in forms.items()}
            seconds = take_turns(steps, rounds, warm_up=3)
            plain, other = statistics.median(seconds["plain"]), statistics.median(seconds[form])
            saved = f"saves {1 - other / plain:.0%} of {1000 * plain:.2f} ms"
            print(f"{name}, {form}: {tensors} tensors of {elements}: {saved}")


if __name__ == "__main__":
    main()
