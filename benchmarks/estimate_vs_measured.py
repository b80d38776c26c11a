"""The estimate of memory beside a real training: one process of its own for each setting.

    python benchmarks/estimate_vs_measured.py

Measured are the peak of resident memory of two steps over what was resident before the model was made, with an
allocator that returns freed memory at once, and by category what is allocated: weights, gradients, the optimizer's
states, and activations, which are resident at the end of the forward pass. A line for each model and setting.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch
from torch import nn

from farandole.bench.models import Bert, LanguageModel, resnet50
from farandole.core.host.process_status import resident_bytes
from farandole.plan.memory import PRECISIONS, RECOMPUTE, Setting, memory_of
from farandole.train.analysis.probe import Question, make_optimizer, probe
from farandole.train.analysis.user_code import batch_in, forward_loss, recomputed, weight_type
from shared import give_back_large_blocks, make_parser, peak_bytes_from_now


def gpt() -> nn.Module:
    return LanguageModel(width=768, depth=12, heads=12, context=256, vocabulary=16_384)


def gpt_batch() -> torch.Tensor:
    return torch.zeros(4, 256, dtype=torch.int64)


def bert_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 128, dtype=torch.int64), torch.zeros(4, 128, dtype=torch.int64)


def images() -> torch.Tensor:
    return torch.zeros(8, 3, 224, 224, dtype=torch.float32)


MODELS = {"gpt": (gpt, gpt_batch), "bert": (Bert, bert_batch), "resnet50": (resnet50, images)}


def main() -> None:
    parser = make_parser(__doc__, models=(list(MODELS), "which", list(MODELS)))
    parser.add_argument(
        "--one", nargs=3, metavar=("MODEL", "PRECISION", "RECOMPUTE"), help="measure in this process"
    )
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    for name in arguments.models:
        for precision in PRECISIONS:
            for recompute in RECOMPUTE:
                compare(name, precision, recompute)


def compare(name: str, precision: str, recompute: str) -> None:
    done = subprocess.run(
        [sys.executable, __file__, "--one", name, precision, recompute], capture_output=True, text=True, check=True
    )
    real = json.loads(done.stdout)
    make_model, make_batch = MODELS[name]
    question = Question(make_model, make_batch, precisions=[precision], recompute=[recompute])
    said = memory_of(probe(question).facts, Setting("0", precision, recompute, 1))
    cells = []
    for category in ("weights", "gradients", "optimizer", "activations", "total"):
        estimated, measured = getattr(said, f"{category}_bytes"), real[category]
        share = f"{estimated / measured - 1:+.1%}"
        cells.append(f"{category} {estimated / 1e6:.0f} / {measured / 1e6:.0f} MB ({share})")
    print(f"{name}, {precision}, {recompute}: {', '.join(cells)}", flush=True)


def measure(name: str, precision: str, recompute: str) -> dict[str, int]:
    """Train two steps; return bytes by category, and the peak over what was resident before."""
    give_back_large_blocks()
    _train(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), torch.ones(512, 512), precision)
    peak_bytes = peak_bytes_from_now()
    make_model, make_batch = MODELS[name]
    model = make_model()
    with recomputed(model, recompute):
        optimizer, activations = _train(model, make_batch(), precision)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": sum(each.nbytes for each in [*model.parameters(), *model.buffers()]),
        "gradients": sum(each.grad.nbytes for each in model.parameters() if each.grad is not None),
        "optimizer": sum(each.nbytes for each in states),
        "activations": activations,
        "total": peak_bytes(),
    }


def _train(model: nn.Module, batch: Any, precision: str) -> tuple[torch.optim.Optimizer, int]:
    """Train two steps; return the optimizer, and what is resident because of the forward pass."""
    dtype = weight_type(precision)
    model.to(dtype=dtype)
    optimizer = make_optimizer("adamw", model.parameters())
    activations = 0
    for _ in range(2):
        resident = resident_bytes() or 0
        inputs = batch_in(dtype, batch)
        loss = forward_loss(model, inputs, None, device="cpu", precision=precision)
        activations = (resident_bytes() or 0) - resident
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return optimizer, activations


if __name__ == "__main__":
    main()
