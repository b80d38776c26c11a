"""Trainings with transformers' Trainer that save, resume and load their best model, by a plan or on one process.

``python -m tests.ranks.sharded_trainer_script stock|ours FILE`` leaves models in the folder of ``FILE``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

import farandole as fd
from farandole.core.vocabulary.errors import FarandoleError
from farandole.integrations.accelerate import FarandoleAccelerator
from farandole.integrations.shared import is_divided
from farandole.integrations.transformers import FarandoleTrainer
from tests.ranks.transformers_script import JOINED, StopAt, language_model, pad, sequences


class Job:
    """Trainings in float64, so that other orders of addition are not seen."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind: type[Any] = FarandoleTrainer if kind == "ours" else Trainer
        self.size = fd.init(progress=False).size if kind == "ours" else 1
        self.folder = folder
        self.results: dict[str, Any] = {}

    def trainer(self, name: str, model: Any, callbacks: Any = (), **named: Any) -> Any:
        set_seed(1)
        arguments = TrainingArguments(
            output_dir=str(self.folder / name), use_cpu=True, per_device_train_batch_size=JOINED // self.size,
            per_device_eval_batch_size=4, num_train_epochs=3, optim="adamw_torch",
            learning_rate=0.01, report_to=[], disable_tqdm=True, **{"save_strategy": "epoch", **named},
        )  # fmt: skip
        return self.kind(
            model=model, args=arguments, train_dataset=sequences(), eval_dataset=sequences(8), data_collator=pad,
            callbacks=list(callbacks),
        )  # fmt: skip

    def run(self) -> None:
        whole = self.trainer("whole", language_model().double())
        whole.train()
        whole.save_model(str(self.folder / "whole" / "last"))
        self.refused(whole)
        self.trainer("stopped", language_model().double(), [StopAt(4)], save_strategy="no").train()
        again = self.trainer("again", language_model().double(), save_strategy="no")
        again.train(resume_from_checkpoint=str(self.folder / "stopped" / "checkpoint-4"))
        again.save_model(str(self.folder / "again" / "last"))
        best = self.trainer(
            "best", language_model().double(), eval_strategy="epoch", load_best_model_at_end=True,
            metric_for_best_model="loss", greater_is_better=True,
        )  # fmt: skip
        best.train()  # the worst one, of the first epoch
        self.results["best"] = best.evaluate()["eval_loss"]
        best.save_model(str(self.folder / "best" / "last"))
        self.accelerated()
        if importlib.util.find_spec("peft"):
            self.adapted()

    def accelerated(self) -> None:
        """Three steps by Accelerate; every rank has the same batch."""
        accelerator = Accelerator(cpu=True) if self.size == 1 else FarandoleAccelerator()
        model = language_model().double()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
        for _ in range(3):
            accelerator.backward(model(**pad(sequences(8))).loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, str(self.folder / "accelerated"))
        if self.size > 1:
            try:
                accelerator.save_state(str(self.folder / "state"))
            except fd.ConfigError as problem:
                self.results["save_state"] = str(problem)

    def adapted(self) -> None:
        peft = importlib.import_module("peft")
        options = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        trainer = self.trainer("adapted", peft.get_peft_model(language_model(), options).double())
        trainer.train()
        trainer.save_model(str(self.folder / "adapted" / "last"))

    def refused(self, trainer: Any) -> None:
        """Let rank 0 fail to write; note what this rank raises."""
        if self.size == 1 or not is_divided(trainer.model):
            return
        (self.folder / "file").write_text("not a directory")
        model: nn.Module = trainer.model
        before = [id(parameter) for parameter in model.parameters()]
        try:
            trainer.save_model(str(self.folder / "file" / "last"))
            said = "nothing"
        except (FarandoleError, OSError) as problem:
            said = str(problem)
        gathered: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(gathered, said)
        self.results["unwritable"] = gathered
        assert [id(parameter) for parameter in model.parameters()] == before


def main(kind: str, file: str) -> None:
    folder = Path(file).parent / kind
    folder.mkdir(exist_ok=True)
    job = Job(kind, folder)
    job.run()
    if kind == "stock" or fd.world().rank == 0:
        Path(file).write_text(json.dumps(job.results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
