"""How much of an optimizer's time its fused and foreach forms save on the CPU, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/optimizer_forms.py

Printed is, for each class and size of tensors, the fraction of the plain form's time that the other form saves, by
medians of CPU time. `farandole diagnose` predicts from the least of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, (kind, options, form) in CLASSES.items():
        for tensors, elements in SHAPES:
            forms = {"plain": make(kind, {**options, "foreach": False}, tensors, elements)}
            forms[form] = make(kind, {**options, form: True}, tensors, elements)
            seconds: dict[str, list[float]] = {each: [] for each in forms}
            for turn in range(rounds + 3):
                for each in forms if turn % 2 else reversed(forms):
                    begin = time.process_time()
                    forms[each].step()
                    if turn >= 3:
                        seconds[each].append(time.process_time() - begin)
            plain, other = statistics.median(seconds["plain"]), statistics.median(seconds[form])
            saved = f"saves {1 - other / plain:.0%} of {1000 * plain:.2f} ms"
            print(f"{name}, {form}: {tensors} tensors of {elements}: {saved}")


if __name__ == "__main__":
    main()
