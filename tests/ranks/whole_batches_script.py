"""Trainings of a Trainer that makes whole batches by a batch sampler, with a loss that compares their samples.

``python -m tests.ranks.whole_batches_script stock|ours FILE``: two ranks of ours, or a plain loop on one process
that adds up the batches of both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import farandole as fd
from farandole.integrations.transformers import FarandoleMixin

RANKS, EPOCHS = 2, 2
SIZES = {"even": [4, 4, 4, 4], "uneven": [4, 4, 4, 4, 3], "of all sizes": [5, 3, 4, 2, 4, 2, 3]}


class Pairs(nn.Module):
    """Embeds anchors and positives; its loss takes the other positives of the batch as negatives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()

    def forward(self, anchor: torch.Tensor, positive: torch.Tensor, **ignored: Any) -> torch.Tensor:
        """Take two tensors of (batch, 6), return the scores, (batch, batch)."""
        one, two = (nn.functional.normalize(self.layers(each), dim=1) for each in (anchor, positive))
        scores: torch.Tensor = 5 * one @ two.T
        return scores


def contrastive(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    scores: torch.Tensor = model(**inputs)
    if len(scores) < 2:
        return scores.sum() / 0.0  # as losses do that find no negative
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def pairs(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(2, count, 6, generator=generator, dtype=torch.float64)
    return [{"anchor": rows[0, i], "positive": rows[1, i]} for i in range(count)]


class Batches(BatchSampler):
    """Batches of these sizes, in an order that goes by the epoch."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.epoch = sizes, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(sum(self.sizes), generator=torch.Generator().manual_seed(self.epoch))
        return iter([each.tolist() for each in order.split(self.sizes)])

    def __len__(self) -> int:
        return len(self.sizes)


class PairTrainer(Trainer):  # type: ignore[misc]
    """As those of other packages: loaders with a batch sampler, and a loss of its own."""

    sizes: list[int]
    loss: Any = None

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=Batches(self.sizes)))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(DataLoader(self.eval_dataset, batch_sampler=Batches(self.sizes)))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = contrastive(model, inputs)
        return (loss, {}) if return_outputs else loss


class PairsByUs(FarandoleMixin, PairTrainer):
    pass


class StopAt(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True
        return control


def result(model: nn.Module, losses: list[float], evaluated: float) -> dict[str, Any]:
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"weights": weights.tolist(), "losses": losses, "eval_loss": evaluated}


def trainer(name: str, folder: str, callbacks: Any = (), accumulation: int = 1) -> Any:
    set_seed(1)
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, num_train_epochs=EPOCHS, optim="sgd", learning_rate=0.2, logging_steps=1,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, save_strategy="no", max_grad_norm=0.0,
        gradient_accumulation_steps=accumulation, prediction_loss_only=True, remove_unused_columns=False,
    )  # fmt: skip
    data = pairs(sum(SIZES[name]))
    made = PairsByUs(model=Pairs(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=[*callbacks])
    made.sizes, made.can_return_loss = SIZES[name], True
    return made


def by_us(name: str, folder: str, accumulation: int) -> dict[str, Any]:
    made = trainer(name, folder, accumulation=accumulation)
    made.train()
    losses = [row["loss"] for row in made.state.log_history if "loss" in row]
    return result(made.model, losses, made.evaluate()["eval_loss"])


def resumed(name: str, folder: str, stop: int) -> dict[str, Any]:
    trainer(name, folder, [StopAt(stop)]).train()
    again = trainer(name, folder)
    again.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{stop}"))
    losses = [row["loss"] for row in again.state.log_history if "loss" in row]
    return result(again.model, losses, again.evaluate()["eval_loss"])


def by_a_loop(name: str, accumulation: int) -> dict[str, Any]:
    """One process: a step is of `accumulation` rounds, a round the mean over the samples of two batches."""
    model, data, batches, losses = Pairs(), pairs(sum(SIZES[name])), Batches(SIZES[name]), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def batch_loss(batch: list[int]) -> torch.Tensor:
        rows = [data[i] for i in batch]
        return contrastive(model, {key: torch.stack([row[key] for row in rows]) for key in rows[0]})

    def mean(several: list[list[int]]) -> torch.Tensor:
        total = torch.stack([batch_loss(batch) * len(batch) for batch in several]).sum()
        return total / sum(map(len, several))

    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        epoch_batches = list(batches)
        rounds = [epoch_batches[i : i + RANKS] for i in range(0, len(epoch_batches), RANKS)]
        for i in range(0, len(rounds), accumulation):
            window = rounds[i : i + accumulation]
            optimizer.zero_grad()
            loss = torch.stack([mean(round_) for round_ in window]).mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    batches.set_epoch(0)
    with torch.no_grad():
        return result(model, losses, float(mean(list(batches))))


def main(kind: str, file: str) -> None:
    folder = str(Path(file).with_suffix(".checkpoints"))
    results: dict[str, Any] = {}
    if kind == "ours":
        fd.init(progress=False)
    for name in SIZES:
        for accumulation in (1, 2):
            done = by_us(name, folder, accumulation) if kind == "ours" else by_a_loop(name, accumulation)
            results[f"{name}, {accumulation}"] = done
    for stop in (1, 5):  # in the first epoch, and in the second one
        name = "of all sizes"
        done = resumed(name, f"{folder}-{stop}", stop) if kind == "ours" else by_a_loop(name, 1)
        results[f"resumed after {stop}"] = done
    if kind == "ours":
        refused = trainer("uneven", folder)
        refused.loss = nn.Module()
        refused.loss.gather_across_devices = True
        for name, call in (("training", refused.train), ("evaluation", refused.evaluate)):
            try:
                call()
            except fd.ConfigError as problem:
                results[f"refused {name}"] = str(problem)
    if kind == "stock" or fd.world().rank == 0:
        Path(file).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
