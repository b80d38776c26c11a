"""One rank of a training with a fault: models of transformers, timm and PyG from configurations, real losses.

    farandole run -np 2 -- python benchmarks/verdict_trainings.py gpt2 --fault slow_data --size 0.06

The loop is a plain one, that of transformers' Trainer (`trainer-MODEL`), or that of Lightning (`lightning-MODEL`).

The fault notes what it took by its own clock (`taken-rankN.json` in the run directory), the truth of its cost.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import farandole as fd
from shared import make_parser

FAULTS = (
    "none", "slow_data", "busy_data", "late_forward", "late_backward", "late_optimizer", "turns", "gc",
    "checkpoint", "silent_save", "evaluation", "irregular", "own_code", "own_code_after",
    "threads", "slow_start", "micro_batches", "long_rows",
)  # fmt: skip
"""`long_rows`: rank 1 computes twice on its batch."""


class Clock:
    """What a rank's fault took, by step."""

    def __init__(self) -> None:
        self.step = 0
        self.taken: dict[int, float] = {}

    def sleep(self, seconds: float) -> None:
        """Sleep, and note how long it took."""
        begin = time.monotonic()
        time.sleep(seconds)
        self.note(begin)

    def burn(self, seconds: float) -> None:
        """Keep the core busy for so many seconds of CPU time."""
        begin, end = time.monotonic(), time.process_time() + seconds
        while time.process_time() < end:
            pass
        self.note(begin)

    def note(self, begin: float) -> None:
        """Note what began then, in monotonic seconds, and is over now."""
        self.taken[self.step] = self.taken.get(self.step, 0.0) + time.monotonic() - begin


Batch = Any
Compute = Callable[[nn.Module, Batch], torch.Tensor]


class Rows(Dataset[Any]):
    """Samples, each of which may take time to read."""

    def __init__(self, samples: list[Any], read: Callable[[], None]) -> None:
        self.samples, self.read = samples, read

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.read()
        return self.samples[index]


def text_rows(count: int, length: int) -> list[torch.Tensor]:
    """Rows of bytes of Python's own source."""
    data = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    assert len(tokens) > count * length, "too little text"
    return list(tokens[: count * length].view(count, length))


def images(count: int, size: int) -> list[tuple[torch.Tensor, int]]:
    """Noise with a brightness that follows the label."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, size, size, generator=generator) + 0.2 * (i % 10), i % 10) for i in range(count)]


def declare_torchvision_operators() -> None:
    """Let timm import torchvision where its compiled part was built for another torch."""
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # its operators go when it does


def language(name: str) -> tuple[nn.Module, Compute]:
    import transformers as hf

    shape = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256}
    model: nn.Module
    if name == "gpt2":
        model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=256, n_positions=128, n_embd=192, n_layer=3, n_head=4))
    elif name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=512, **shape))
    else:
        model = hf.BertForMaskedLM(hf.BertConfig(intermediate_size=768, **shape))

    def masked(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.rand(rows.shape) < 0.15
        loss: torch.Tensor = model(
            input_ids=rows.masked_fill(hidden, 0), labels=rows.masked_fill(~hidden, -100)
        ).loss
        return loss

    def causal(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=rows, labels=rows).loss
        return loss

    return model, masked if name == "bert" else causal


def pictures(name: str) -> tuple[nn.Module, Compute]:
    if name == "vit":
        import transformers as hf

        vit: nn.Module = hf.ViTForImageClassification(
            hf.ViTConfig(
                image_size=64, patch_size=8, hidden_size=192, intermediate_size=512,
                num_hidden_layers=3, num_attention_heads=4, num_labels=10,
            )
        )  # fmt: skip
        return vit, lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10)
    return model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])


def graphs(count: int) -> list[Any]:
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    return [
        Data(
            x=torch.randn(400, 64, generator=generator),
            edge_index=torch.randint(0, 400, (2, 3200), generator=generator),
            y=torch.tensor([i % 4]),
        )
        for i in range(count)
    ]


def graph_model() -> tuple[nn.Module, Compute]:
    from torch_geometric.nn import GAT, global_mean_pool

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gat, self.head = GAT(64, 128, 3, 128, heads=4), nn.Linear(128, 4)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.head(global_mean_pool(self.gat(batch.x, batch.edge_index), batch.batch))  # type: ignore[no-any-return]

    return Classifier(), lambda model, batch: nn.functional.cross_entropy(model(batch), batch.y)


def build(name: str, batch: int, steps: int, read: Callable[[], None], workers: int) -> tuple[Any, Compute, Any]:
    """Return the model, its loss, and a loader with a whole epoch of `steps` batches for each rank."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    count = batch * steps * ranks
    options: dict[str, Any] = {"batch_size": batch, "num_workers": workers}
    if workers:
        options |= {"prefetch_factor": 4, "persistent_workers": True}
    make_loader: Any = DataLoader
    some: list[Any]
    if name in {"gpt2", "llama", "bert"}:
        (model, compute), some = language(name), text_rows(256, 128)
    elif name == "gat":
        from torch_geometric.loader import DataLoader as GraphLoader

        (model, compute), some, make_loader = graph_model(), graphs(32), GraphLoader
    else:
        (model, compute), some = pictures(name), images(256, 64)
    return model, compute, make_loader(Rows([some[i % len(some)] for i in range(count)], read), **options)


BATCH = {
    "gpt2": 4, "llama": 4, "bert": 4, "vit": 16, "resnet18": 8, "mobilenetv3_small_050": 32, "convnext_atto": 6,
    "gat": 2,
}  # fmt: skip
"""Samples of a rank."""


class Fault:
    """Injects one fault at the places of a step."""

    def __init__(self, arguments: argparse.Namespace, rank: int, batch: int) -> None:
        self.name, self.size, self.every = arguments.fault, arguments.size, arguments.every
        self.rank, self.batch, self.clock = rank, batch, Clock()

    def read(self) -> None:
        """Read one sample."""
        if self.name == "slow_data":
            self.clock.sleep(self.size / self.batch)
        if self.name == "busy_data":
            self.clock.burn(self.size / self.batch)

    def before_loss(self, compute: Compute, model: nn.Module, rows: Batch) -> None:
        """Compute on the batch once more, if that is the fault."""
        if self.name == "long_rows" and self.rank == 1:
            begin = time.monotonic()
            compute(model, rows).detach()
            self.clock.note(begin)

    def forward(self, *_: object) -> None:
        """Do what goes before forward."""
        step, clock = self.clock.step, self.clock
        if self.name == "late_forward" and self.rank == 1:
            clock.sleep(self.size)
        if self.name == "turns" and step % 2 == self.rank:
            clock.sleep(self.size)
        if self.name == "irregular" and step % 7 == 6:
            clock.sleep(7 * self.size)
        if self.name == "slow_start" and step < 3:
            clock.sleep(20 * self.size)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Do what goes at the begin of backward."""
        if self.name == "late_backward" and self.rank == 1:
            self.clock.sleep(self.size)
        return gradient

    def before_optimizer(self) -> None:
        """Do what goes between backward and the optimizer."""
        if self.name == "own_code":
            self.clock.sleep(self.size)
        if self.name == "gc":
            begin = time.monotonic()
            gc.collect()
            self.clock.note(begin)

    def after_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        """Do what goes after the optimizer."""
        if self.name == "own_code_after":
            self.clock.sleep(self.size)
        if self.clock.step % self.every != self.every - 1:
            return
        if self.name == "checkpoint":
            with fd.phase("checkpoint"):
                self.clock.sleep(5 * self.size)
        if self.name == "evaluation":
            with fd.phase("evaluation"):
                self.clock.sleep(5 * self.size)
        if self.name == "silent_save":
            begin = time.monotonic()
            for copy in range(int(self.size)):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, directory / f"saved{self.rank}-{copy}.pt")
                os.sync()
            self.clock.note(begin)


class LateOptimizer(torch.optim.AdamW):
    """Sleeps on rank 1 before it steps."""

    def __init__(self, parameters: Any, fault: Fault, **options: Any) -> None:
        super().__init__(parameters, lr=1e-3, **options)
        self.fault = fault

    def step(self, closure: Any = None) -> Any:
        """Take a step, late on rank 1."""
        if self.fault.rank == 1:
            self.fault.clock.sleep(self.fault.size)
        return super().step(closure)


@dataclass
class Training:
    """What a loop trains, and with which fault."""

    model: nn.Module
    compute: Compute
    loader: DataLoader[Any]
    optimizer: torch.optim.Optimizer
    fault: Fault
    directory: Path
    micro: int

    def end_step(self) -> None:
        """Do what goes after a step of the optimizer."""
        self.fault.after_optimizer(self.model, self.optimizer, self.directory)
        self.fault.clock.step += 1


def plain_loop(training: Training) -> None:
    """Train as a script of one's own does."""
    fault, compute, micro = training.fault, training.compute, training.micro
    model, optimizer = fd.distribute(training.model, training.optimizer)
    last = 0.0
    for number, rows in enumerate(fd.shard(training.loader)):
        if number % micro == 0:
            optimizer.zero_grad()
        fault.before_loss(compute, model, rows)
        loss = compute(model, rows)
        loss.register_hook(fault.backward)
        (loss / micro).backward()
        if number % micro < micro - 1:
            continue
        fault.before_optimizer()
        optimizer.step()
        training.end_step()
        last = loss.item()
    print("loss", last, file=sys.stderr)


def trainer_loop(training: Training) -> None:
    """Train as transformers' Trainer does; batches are those of the loader's dataset and batch size."""
    from transformers import TrainerCallback, TrainingArguments

    from farandole.integrations.transformers import FarandoleTrainer

    fault, loader = training.fault, training.loader

    class Faults(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            fault.before_optimizer()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            training.end_step()

    class Trainer(FarandoleTrainer):
        loss_is_scaled_for_ga = False  # ours is a mean over the batch

        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            rows = inputs["rows"]
            fault.before_loss(training.compute, model, rows)
            loss = training.compute(model, rows)
            loss.register_hook(fault.backward)
            return loss

    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"rows": default_collate(samples)}

    arguments = TrainingArguments(
        str(training.directory / "trainer"), use_cpu=True, per_device_train_batch_size=fault.batch,
        num_train_epochs=1, save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
        dataloader_num_workers=loader.num_workers, dataloader_persistent_workers=loader.num_workers > 0,
        dataloader_prefetch_factor=loader.prefetch_factor if loader.num_workers else None, logging_steps=1000,
    )  # fmt: skip
    Trainer(
        model=training.model, args=arguments, train_dataset=loader.dataset, data_collator=collate,
        optimizers=(training.optimizer, None), callbacks=[Faults()],
    ).train()  # fmt: skip


def lightning_loop(training: Training) -> None:
    """Train as Lightning does."""
    import lightning

    from farandole.integrations.lightning import FarandoleStrategy

    fault = training.fault

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = training.model

        def training_step(self, rows: Any, _: int) -> torch.Tensor:
            fault.before_loss(training.compute, self.inner, rows)
            loss = training.compute(self.inner, rows)
            loss.register_hook(fault.backward)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.optimizer

        def train_dataloader(self) -> Any:
            return fd.shard(training.loader)

        def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
            fault.before_optimizer()

        def on_train_batch_end(self, *_: Any) -> None:
            training.end_step()

    lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=FarandoleStrategy(), max_epochs=1,
        use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    ).fit(Module())  # fmt: skip


def main() -> None:
    parser = make_parser(
        __doc__,
        fault=("none", "see FAULTS", FAULTS),
        size=(0.06, "of the fault; seconds a step where it sleeps"),
        steps=40,
        batch=(int, "samples of a rank"),
        workers=0,
        optimizer=("default", "which form", ["default", "foreach", "fused"]),
        every=(5, "steps from one pause to the next"),
        freeze=(False, "collect once and freeze before the loop"),
    )
    parser.add_argument("training", help="a model: " + ", ".join(BATCH) + "; or trainer-gpt2, lightning-vit, ...")
    arguments = parser.parse_args()
    declare_torchvision_operators()
    torch.manual_seed(0)
    loop, _, name = arguments.training.rpartition("-")
    if not loop:
        fd.init()
    batch = arguments.batch or BATCH[name]
    fault = Fault(arguments, int(os.environ["RANK"]), batch)
    clutter: list[Any] = []  # what lives through the run, for the collector to look at
    if fault.name == "gc":
        clutter += [{str(i): [i]} for i in range(int(1_500_000 * arguments.size))]
    if fault.name == "threads":
        torch.set_num_threads(int(arguments.size))
    micro = 4 if fault.name == "micro_batches" else 1
    model, compute, loader = build(name, batch // micro, arguments.steps * micro, fault.read, arguments.workers)
    options: dict[str, Any] = {} if arguments.optimizer == "default" else {arguments.optimizer: True}
    optimizer: torch.optim.Optimizer
    if fault.name == "late_optimizer":
        optimizer = LateOptimizer(model.parameters(), fault, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    model.register_forward_pre_hook(fault.forward)
    if arguments.freeze:
        gc.collect()
        gc.freeze()
    training = Training(model, compute, loader, optimizer, fault, Path(os.environ["FARANDOLE_RUN_DIR"]), micro)
    {"": plain_loop, "trainer": trainer_loop, "lightning": lightning_loop}[loop](training)
    (training.directory / f"taken-rank{fault.rank}.json").write_text(json.dumps(fault.clock.taken))


if __name__ == "__main__":
    main()
