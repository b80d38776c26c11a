"""Trainings with sentence-transformers' Trainer, by a plain loop on one process ("stock") or by ours on two ranks.

``python -m tests.ranks.sentence_script stock|ours FILE``. The models are small and random: nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss, SoftmaxLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast, TrainerCallback, set_seed

import farandole as fd
from farandole.integrations.transformers import FarandoleMixin

EPOCHS, BATCH = 2, 4


class ByUs(FarandoleMixin, SentenceTransformerTrainer):  # type: ignore[misc]
    pass


def make_bert(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(60))]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(str(folder))
    torch.manual_seed(0)
    BertModel(BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )).save_pretrained(str(folder))  # fmt: skip


def model(bert: Path) -> Any:
    return SentenceTransformer(modules=[Transformer(str(bert)), Pooling(16)], device="cpu").double()


def pairs(count: int, first: int = 0) -> Any:
    numbers = range(first, first + count)
    anchors = [f"w{i % 60} w{i * 7 % 60}" for i in numbers]
    return Dataset.from_dict({"anchor": anchors, "positive": [f"w{i % 60} w{i * 11 % 60} w3" for i in numbers]})


class StopAt(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True
        return control


CASES: dict[str, dict[str, Any]] = {
    "whole rounds": {"data": (16,)},
    "uneven": {"data": (19,)},
    "without duplicates": {"data": (19,), "batch_sampler": "no_duplicates"},
    "two data sets": {"data": (13, 9)},
    "resumed": {"data": (19,), "stop": 4},
    "accumulated": {"data": (16,), "gradient_accumulation_steps": 2},
    "gathered": {"data": (16,), "gathers": True},
}


def trainer(kind: Any, bert: Path, folder: str, case: dict[str, Any], *callbacks: Any, loss: Any = None) -> Any:
    made, data = model(bert), [pairs(count, 20 * i) for i, count in enumerate(case["data"])]
    train: Any = data[0] if len(data) == 1 else DatasetDict({f"set {i}": each for i, each in enumerate(data)})
    set_seed(1)
    named = {name: case[name] for name in ("batch_sampler", "gradient_accumulation_steps") if name in case}
    arguments = SentenceTransformerTrainingArguments(
        folder, use_cpu=True, num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, logging_steps=1,
        per_device_eval_batch_size=BATCH, report_to=[], save_strategy="no", disable_tqdm=True, optim="sgd",
        learning_rate=0.2, lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0, **named,
    )  # fmt: skip
    arguments.dataloader_drop_last = False  # their constructor sets it where there are several processes
    gathers = {"gather_across_devices": True} if case.get("gathers") else {}
    return kind(
        model=made, args=arguments, train_dataset=train, eval_dataset=data[0], callbacks=[*callbacks],
        loss=loss(made) if loss else MultipleNegativesRankingLoss(made, **gathers),
    )  # fmt: skip


def result(trained: Any, losses: list[float], evaluated: float) -> dict[str, Any]:
    weights = torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])
    return {"weights": weights.tolist(), "losses": losses, "eval_loss": evaluated}


def by_us(bert: Path, folder: str, case: dict[str, Any]) -> dict[str, Any]:
    if "stop" in case:
        trainer(ByUs, bert, folder, case, StopAt(case["stop"])).train()
    made = trainer(ByUs, bert, folder, case)
    made.train(resume_from_checkpoint=f"{folder}/checkpoint-{case['stop']}" if "stop" in case else None)
    losses = [row["loss"] for row in made.state.log_history if "loss" in row]
    return result(made.model, losses, made.evaluate()["eval_loss"])


def by_a_loop(bert: Path, folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """One process, with the batches of their own Trainer: a round is the mean over the samples of two of them."""
    made = trainer(SentenceTransformerTrainer, bert, folder, case)
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.2)
    joined = MultipleNegativesRankingLoss(made.model)

    def mean(batches: list[Any]) -> Any:
        if case.get("gathers"):  # each anchor sees the positives of both
            features = [made.collect_features(dict(batch))[0] for batch in batches]
            rows = [[each["sentence_embedding"] for each in map(made.model, several)] for several in features]
            return joined.compute_loss_from_embeddings([torch.cat(each) for each in zip(*rows, strict=True)], None)
        sizes = [len(batch["anchor_input_ids"]) for batch in batches]
        losses = [made.compute_loss(made.model, dict(batch)) for batch in batches]
        return sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / sum(sizes)

    losses, accumulation = [], case.get("gradient_accumulation_steps", 1)
    loader, evaluation = made.get_train_dataloader(), made.get_eval_dataloader()
    made.model.train()
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        batches = list(loader)
        rounds = [batches[i : i + 2] for i in range(0, len(batches), 2)]
        for i in range(0, len(rounds), accumulation):
            optimizer.zero_grad()
            loss = torch.stack([mean(each) for each in rounds[i : i + accumulation]]).mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    made.model.eval()
    with torch.no_grad():
        batches = list(evaluation)
        steps = [batches[i : i + 2] for i in range(0, len(batches), 2)] if case.get("gathers") else [batches]
        return result(made.model, losses, float(sum(map(mean, steps)) / len(steps)))


def main(kind: str, file: str) -> None:
    folder = Path(file).with_suffix(".files")
    if kind == "ours":
        fd.init(progress=False)
    if kind == "stock" or fd.world().rank == 0:
        make_bert(folder / "bert")
    if kind == "ours":
        fd.mean(0.0)  # until it is there
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        results[name] = (by_us if kind == "ours" else by_a_loop)(folder / "bert", str(folder / name), case)
    if kind == "ours":
        refused = {
            "gathered unevenly": lambda: trainer(ByUs, folder / "bert", "x", {"data": (19,), "gathers": True}),
            "gathered of two": lambda: trainer(ByUs, folder / "bert", "x", {"data": (8, 8), "gathers": True}),
            "own parameters": lambda: trainer(
                ByUs, folder / "bert", "x", {"data": (8,)}, loss=lambda made: SoftmaxLoss(made, 16, 2)
            ),
        }
        for name, make in refused.items():
            try:
                make().train()
            except fd.ConfigError as problem:
                results[name] = str(problem)
    if kind == "stock" or fd.world().rank == 0:
        Path(file).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
