"""A training step on an accelerator by the engine's own cost: beside plain PyTorch and DistributedDataParallel.

    python benchmarks/device_step.py
    python benchmarks/device_step.py --width 1024 --layers 8 --batch 1 --tokens 32

One rank exchanges with itself, which the package does not do otherwise: what is left is what the engine costs
where there is no link to wait for. All forms train a copy of one encoder on one input with fused AdamW, in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.comm.device.accelerator import accelerators, backend_of, model_of, synchronize
from farandole.comm.engine.parameters import ReducerOptions
from farandole.comm.engine.reducer import GradientReducer
from farandole.comm.world.world import World
from models import step_of
from shared import median_ms, read_options

FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, 4 MiB": {"bucket_bytes": 4 << 20},
    "none, 128 MiB": {"bucket_bytes": 128 << 20},
    "bf16, 25 MiB": {"codec": "bf16", "bucket_bytes": 25 << 20},
    "int8, 25 MiB": {"codec": "int8", "bucket_bytes": 25 << 20},
    "int8, 4 MiB": {"codec": "int8", "bucket_bytes": 4 << 20},
    "int4, 25 MiB": {"codec": "int4", "bucket_bytes": 25 << 20},
    "powersgd:4, 25 MiB": {"codec": "powersgd:4", "bucket_bytes": 25 << 20},
}


def main() -> None:
    options = read_options(
        __doc__,
        width=1024,
        layers=8,
        batch=8,
        tokens=256,
        rounds=7,
        steps=10,
        bf16=(False, "under autocast"),
        device=(str, "default: the accelerator"),
        forms=("", "those alone, separated by ';'"),
    )
    device = torch.device(options.device) if options.device else torch.device(accelerators()[0] or "cpu", 0)
    world = _exchanging_alone(device)
    forms = [form for form in options.forms.split(";") if form] or list(FORMS)
    steps = {name: _trainer(name, world, device, options) for name in ("plain", "ddp", *forms)}
    print(json.dumps(_in_turns(steps, device, options) | {"device": model_of(device) or "cpu"}), flush=True)
    steps.clear()
    dist.destroy_process_group()


def _exchanging_alone(device: torch.device) -> World:
    """Return a world of one whose groups are made all the same."""
    store = dist.HashStore()
    backend = backend_of(device) or "gloo"
    place = device if device.type != "cpu" else None
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=place)
    world = fd.init(device=str(device))
    World.store = property(lambda _: dist.PrefixStore("alone", store))  # type: ignore[assignment, method-assign]
    World.new_group = lambda *_, **__: dist.new_group([0])  # type: ignore[method-assign]
    return world


def _trainer(name: str, world: World, device: torch.device, options: argparse.Namespace) -> Callable[[], None]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(options.width, 16, 4 * options.width, 0.0, batch_first=True)
    model: nn.Module = nn.TransformerEncoder(layer, options.layers).to(device)
    rows = torch.randn(options.batch, options.tokens, options.width, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    if name == "ddp":
        model = DistributedDataParallel(model)
    elif name != "plain":
        plan = fd.Plan(route="flat", **FORMS[name])
        reducer = GradientReducer(world, list(model.named_parameters()), plan, ReducerOptions())
        vars(model)["reducer"] = reducer

    def loss_of(model: nn.Module) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            loss: torch.Tensor = model(rows).square().mean()
        return loss

    return step_of(model, loss_of, optimizer)


def _in_turns(
    steps: dict[str, Callable[[], None]], device: torch.device, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return the medians over rounds, in milliseconds: of a step, and of what the host did until it was free."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(options.rounds + 1):
        for name in random.Random(turn).sample(list(steps), len(steps)):
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(options.steps):
                steps[name]()
            free = time.perf_counter()
            synchronize(device)
            if turn:  # the first warms up
                taken[name].append(((time.perf_counter() - begin) / options.steps, (free - begin) / options.steps))
    medians = {name: median_ms([each for each, _ in found], 3) for name, found in taken.items()}
    return {
        name: {
            "milliseconds": medians[name],
            "host_milliseconds": median_ms([host for _, host in found], 3),
            "over_plain": round(medians[name] / medians["plain"], 3),
            "over_ddp": round(medians[name] / medians["ddp"], 3),
        }
        for name, found in taken.items()
    }


if __name__ == "__main__":
    main()
