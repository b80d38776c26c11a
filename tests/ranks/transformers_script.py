"""Trainings with transformers' Trainer, its own or ours: writes weights, losses and metrics to a file.

``python -m tests.ranks.transformers_script stock|ours FILE`` trains on 17 ragged samples with a joined batch of 8.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import farandole as fd
from farandole.integrations.transformers import FarandoleCallback, FarandoleMixin, FarandoleTrainer
from farandole.parallel.model import DistributedModel

JOINED, SAMPLES = 8, 17


def sequences(count: int = SAMPLES) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 50, (n,), generator=generator).tolist()} for n in lengths]


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    tokens = torch.tensor(rows)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens > 0).long(),
        "labels": tokens.masked_fill(tokens == 0, -100),
    }


def language_model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip
    return model


class Classifier(nn.Module):
    """A model that is not transformers' own: its loss is a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class KeywordClassifier(Classifier):
    """Takes ``num_items_in_batch``, and has a loss that is a mean all the same."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        return super().forward(x, labels)


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def points() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {"x": torch.randn(6, generator=generator), "labels": int(torch.randint(3, (1,), generator=generator))}
        for _ in range(SAMPLES)
    ]


class OwnLoss(Trainer):  # type: ignore[misc]
    """A Trainer as users write them: a loss, an optimizer and a log of their own."""

    logged = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0, 4.0])
        each = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="none")
        loss = (each * weights[inputs["labels"]]).mean()
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        self.logged += 1
        super().log(logs, *args, **kwargs)


class OwnLossByUs(FarandoleMixin, OwnLoss):
    pass


class Halved(FarandoleTrainer):
    """Calls the Trainer's own, so its rule holds."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class StopAt(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True
        return control


class Passes(TrainerCallback):  # type: ignore[misc]
    """Counts the exchanges of a training."""

    exchanges = 0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:

        reducer = DistributedModel.of(kwargs["model"]).reducer
        self.exchanges = 0 if reducer is None else reducer.exchanges_done


def accuracy(prediction: Any) -> dict[str, Any]:
    hits = np.argmax(prediction.predictions, -1) == prediction.label_ids
    return {"hits": int(hits.sum()), "count": int(hits.size)}


class Job:
    """One training after the other, all with the same kind of Trainer."""

    def __init__(self, kind: str, folder: str) -> None:
        self.kind: type[Any] = FarandoleTrainer if kind == "ours" else Trainer
        self.size = fd.init(progress=False).size if kind == "ours" else 1
        self.folder = folder
        self.results: dict[str, Any] = {}

    def trainer(self, model: nn.Module, data: Any, collate: Any = None, callbacks: Any = (), **named: Any) -> Any:
        set_seed(1)
        arguments = TrainingArguments(
            output_dir=self.folder, use_cpu=True, per_device_train_batch_size=JOINED // self.size,
            per_device_eval_batch_size=JOINED // self.size, num_train_epochs=2, optim="sgd", learning_rate=0.2,
            logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", **named,
        )  # fmt: skip
        extra = {} if collate is None else {"data_collator": collate}
        recorders = [FarandoleCallback()] if self.size == 1 else []  # a Trainer of ours has one
        return self.kind(
            model=model, args=arguments, train_dataset=data, eval_dataset=data, compute_metrics=accuracy,
            callbacks=[*recorders, *callbacks], **extra,
        )  # fmt: skip

    def note(self, name: str, trainer: Any, **more: Any) -> None:
        weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        self.results[name] = {"weights": weights.tolist(), "losses": losses, **more}

    def run(self) -> None:
        counter = Passes()
        for accumulation in (1, 2):
            trainer = self.trainer(
                language_model(), sequences(), pad, [counter], gradient_accumulation_steps=accumulation
            )
            trainer.train()
            self.note(f"tokens, {accumulation}", trainer, exchanges=counter.exchanges)
            trainer = self.trainer(
                Classifier(),
                points(),
                None,
                [counter],
                gradient_accumulation_steps=accumulation,
                max_grad_norm=0.1,
            )
            trainer.train()
            metrics = trainer.evaluate()
            self.note(f"means, {accumulation}", trainer, hits=metrics["eval_hits"], count=metrics["eval_count"])
        self.evaluated()
        self.subclassed()
        self.resumed()
        try:
            self.trainer(language_model(), sequences(), pad, average_tokens_across_devices=False)
        except fd.ConfigError as problem:
            self.results["refusal"] = str(problem)

    def evaluated(self) -> None:
        """Losses of evaluations in batches of 4, with predictions and without."""
        for count in (13, 16, 17):
            for name, model, data, collate in (
                ("points", Classifier(), points(), None),
                ("keywords", KeywordClassifier(), points(), None),
                ("tokens", language_model(), sequences(), pad),
            ):
                trainer = self.trainer(model, data, collate)
                trainer.args.per_device_eval_batch_size = 4
                losses = [trainer.evaluate(data[:count])["eval_loss"] if name != "tokens" else None]
                trainer.compute_metrics = None
                losses.append(trainer.evaluate(data[:count])["eval_loss"])
                streamed = trainer.evaluate(Stream(data[:count]))["eval_loss"] if name != "tokens" else None
                with torch.no_grad():
                    each = [model(**trainer.data_collator([row]))["loss"].item() for row in data[:count]]
                self.results[f"{name} evaluated, {count}"] = {
                    "losses": losses,
                    "streamed": streamed,
                    "mean": sum(each) / count,
                }

    def subclassed(self) -> None:
        kind, own = self.kind, OwnLoss if self.kind is Trainer else OwnLossByUs
        for accumulation in (1, 2):
            self.kind = own
            trainer = self.trainer(Classifier(), points(), gradient_accumulation_steps=accumulation)
            trainer.train()
            self.note(f"subclass, {accumulation}", trainer, logged=trainer.logged)
        if kind is not Trainer:
            trainer = self.trainer(language_model(), sequences(), pad)
            try:
                trainer.train()
            except fd.ConfigError as problem:
                self.results["unknown loss"] = str(problem)
            self.kind = Halved
            self.trainer(language_model(), sequences(), pad)._refuse_unknown_loss()
        self.kind = kind

    def resumed(self) -> None:
        stopped = self.trainer(Classifier(), points(), None, [StopAt(2)])
        stopped.train()
        checkpoints = sorted(Path(self.folder).glob("checkpoint-*"))
        again = self.trainer(Classifier(), points(), None)
        again.train(resume_from_checkpoint=str(checkpoints[-1]))
        self.note("resumed", again, files=sorted(path.name for path in checkpoints[-1].iterdir()))
        whole = self.trainer(Classifier(), points(), None)
        whole.train()
        self.note("whole", whole)
        whole.train()  # once more, with a new optimizer
        self.note("twice", whole)


def main(kind: str, file: str) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = str(Path(file).with_suffix(".checkpoints")) if kind == "ours" else own
        job = Job(kind, folder)
        job.run()
    if kind == "stock" or fd.world().rank == 0:
        Path(file).write_text(json.dumps(job.results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
