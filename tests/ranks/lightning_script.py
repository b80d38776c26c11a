"""Fits with Lightning: ``python -m tests.ranks.lightning_script stock|ours FILE``. Writes weights to a file."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import farandole as fd
from farandole.integrations.lightning import FarandoleRecorder, FarandoleStrategy

JOINED = 8


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator))


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.layers(x), y), sync_dist=True, batch_size=len(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Module):
    """Two networks, each with an optimizer and a backward pass of its own in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, number: int) -> Any:
        x, y = batch
        first, second = self.optimizers()
        first.zero_grad()
        made = self.layers(x)
        self.manual_backward(nn.functional.mse_loss(made, y))
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        second.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.critic(torch.cat([x, made.detach()], 1)), y**2))
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (self.layers, self.critic)]


class Job:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.size = 1 if kind == "stock" else fd.init(progress=False).size
        self.results: dict[str, Any] = {}

    def fit(self, name: str, count: int, *, shard: bool = False, kind: Any = Module, **named: Any) -> Any:
        seed_everything(1, verbose=False)
        strategy: Any = "auto" if self.kind == "stock" else FarandoleStrategy()
        module = kind()
        loader: DataLoader[Any] = DataLoader(data(count), batch_size=JOINED // self.size)
        check = DataLoader(data(16), batch_size=JOINED // self.size)
        if self.kind == "ours" and shard:
            loader = fd.shard(loader)
        elif self.kind == "ours":  # Lightning's own sampler would shuffle
            order: Any = DistributedSampler(loader.dataset, self.size, fd.world().rank, shuffle=False)
            loader = DataLoader(loader.dataset, batch_size=JOINED // self.size, sampler=order)
        trainer = Trainer(
            accelerator="cpu", devices=self.size, strategy=strategy, max_epochs=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[] if name == "accumulated" else [FarandoleRecorder()], log_every_n_steps=1,
            use_distributed_sampler=not shard, **named,
        )  # fmt: skip
        trainer.fit(module, loader, check)
        weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        self.results[name] = {"weights": weights.tolist(), "val": float(trainer.callback_metrics["val"])}
        return trainer

    def run(self, folder: Path) -> None:
        trainer = self.fit("plain", 24)
        trainer.save_checkpoint(folder / "model.ckpt")
        self.fit("accumulated", 24, accumulate_grad_batches=2, gradient_clip_val=0.5)
        self.fit("uneven", 17, shard=True)
        self.fit("manual", 24, kind=Manual)
        self.fit("manual, uneven", 17, kind=Manual, shard=True)
        self.results["saved"] = sorted(path.name for path in folder.iterdir())
        if self.kind == "ours":
            try:
                Trainer(accelerator="cpu", devices=1, strategy="farandole", logger=False).fit(Module())
            except fd.ConfigError as problem:
                self.results["refusal"] = str(problem)


def main(kind: str, file: str) -> None:
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        job = Job(kind)
        job.run(Path(folder))
    if kind == "stock" or fd.world().rank == 0:
        Path(file).write_text(json.dumps(job.results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
