"""Loops with Accelerate: ``python -m tests.ranks.accelerate_script stock|ours FILE``. Writes weights to a file."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.integrations.accelerate import FarandoleAccelerator

JOINED = 8


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


class Job:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.results: dict[str, Any] = {}

    def accelerator(self, **named: Any) -> Any:
        named["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)  # one order for all sizes
        return Accelerator(cpu=True, **named) if self.kind == "stock" else FarandoleAccelerator(**named)

    def loop(self, accelerator: Any, several: bool = False) -> list[nn.Module]:
        set_seed(3)
        models = [network(), network()] if several else [network()]
        optimizer: Any = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)
        loader: Any = DataLoader(data(24), batch_size=JOINED // accelerator.num_processes, shuffle=True)
        prepared: list[Any] = list(accelerator.prepare(*models, optimizer, loader))
        *models, optimizer, loader = prepared
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(*models):
                    loss = sum(nn.functional.mse_loss(model(x), y) for model in models)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_([p for model in models for p in model.parameters()], 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        return models

    def note(self, name: str, models: list[nn.Module]) -> None:
        parameters = [parameter.detach().flatten() for model in models for parameter in model.parameters()]
        self.results[name] = torch.cat(parameters).tolist()

    def run(self) -> None:
        accelerator = self.accelerator(gradient_accumulation_steps=1)
        (model,) = models = self.loop(accelerator)
        self.note("plain", models)
        loader = accelerator.prepare(DataLoader(data(19), batch_size=JOINED // accelerator.num_processes))
        with torch.no_grad():
            rows = [accelerator.gather_for_metrics(model(x)) for x, _ in loader]
        self.results["metrics"] = torch.cat(rows).flatten().tolist()
        accelerator.save_state(str(self.folder / "state"))
        accelerator.wait_for_everyone()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(str(self.folder / "state"))
        self.note("loaded", models)
        accelerator.free_memory()
        self.note("several", self.loop(accelerator, several=True))
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = 2
        self.note("accumulated", self.loop(accelerator))
        if self.kind == "ours":
            self.refusals(accelerator)

    def refusals(self, accelerator: Any) -> None:
        model = network()
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        accelerator.prepare(model, first)
        handlers = {"kwargs_handlers": [DistributedDataParallelKwargs()]}
        said = []
        for wrong in (
            lambda: accelerator.prepare(second),
            lambda: accelerator.join_uneven_inputs([model]),
            lambda: FarandoleAccelerator(**handlers),
            lambda: FarandoleAccelerator(mixed_precision="fp8"),
        ):
            try:
                wrong()
            except fd.ConfigError as problem:
                said.append(str(problem))
        self.results["refusals"] = said


def main(kind: str, file: str) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own) if kind == "stock" else Path(file).parent
        job = Job(kind, folder)
        job.run()
    if kind == "stock" or fd.world().rank == 0:
        Path(file).write_text(json.dumps(job.results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
