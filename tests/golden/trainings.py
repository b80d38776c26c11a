"""One small training in three ways: plain, with int8, and with int8 between two hosts of two ranks.

A model learns to predict the next letter of a text. Text, weights and batches come from seeds, every rank computes
with one thread, and each sum has a fixed order. So every run on one kind of machine gives the same bits.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

import farandole as fd
from farandole.core.host.open_sockets import borrowed, open_sockets
from farandole.core.vocabulary.events import Event, Exchange
from tests.ranks.pool import ranks

STEPS, BATCH, CONTEXT = 24, 32, 8
LETTERS, WIDTH, HIDDEN = 64, 64, 64
# In Linux's `struct tcp_info` (uapi/linux/tcp.h, 4.19 and newer).
_SENT_AND_RESENT_BYTES = struct.Struct("=QQ"), 200
_INFO_BYTES = 216


@dataclass(frozen=True)
class Training:
    """How many ranks train, on how many hosts, with which plan."""

    ranks: int
    hosts: int
    plan: fd.Plan
    tolerance: float
    """By how much of itself a loss may differ on another kind of machine; about five times what was seen."""


def _plan(codec: str, route: Literal["flat", "hierarchical"]) -> fd.Plan:
    """Return a plan with three buckets."""
    return fd.Plan(codec=codec, route=route, bucket_bytes=65536, first_bucket_bytes=16384)


TRAININGS = {
    "plain": Training(2, 1, _plan("none", "flat"), 1e-6),
    "int8": Training(2, 1, _plan("int8", "flat"), 1e-4),
    "two_hosts": Training(4, 2, _plan("int8", "hierarchical"), 1e-4),
}


@dataclass(frozen=True)
class Measured:
    """What a training gave."""

    losses: list[float]
    """The mean over the ranks, for each step."""
    sent_bytes: list[int]
    """By each rank: Farandole's own count, which is a formula where the backend sends and exact elsewhere."""
    tcp_bytes: list[int]
    """By each rank, as the kernel counts on connections between ranks: with headers, without retransmissions."""


def run(name: str) -> Measured:
    """Run a training on the shared pool."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "measured.json"
        ranks(TRAININGS[name].ranks)(train)(name=name, path=str(path))
        return Measured(**json.loads(path.read_text()))


def train(name: str, path: str) -> None:
    """Train on this rank; rank 0 writes what all of them measured."""
    training = TRAININGS[name]
    _pretend_hosts(training)
    world = fd.init(device="cpu", progress=False)
    model = make_model()
    model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), training.plan)
    counter = _ByteCounter()
    world.session.recorder, before = counter, tcp_bytes()
    text, generator = make_text(), torch.Generator().manual_seed(3)
    losses: list[float] = []
    for _ in range(STEPS):
        starts = torch.randint(0, len(text) - CONTEXT, (BATCH,), generator=generator)
        own = starts.chunk(world.size)[world.rank].unsqueeze(1)
        windows = text[own + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found: list[tuple[list[float], int, int]] = [([], 0, 0)] * world.size
    dist.all_gather_object(found, (losses, counter.sent_bytes, tcp_bytes() - before))
    if world.rank == 0:
        each, sent, tcp = zip(*found, strict=True)
        means = [sum(step) / world.size for step in zip(*each, strict=True)]
        Path(path).write_text(json.dumps(asdict(Measured(means, list(sent), list(tcp)))))


def make_text() -> torch.Tensor:
    """Return 4096 letters: four of five follow from the one before."""
    generator = torch.Generator().manual_seed(1)
    successors = torch.randint(0, LETTERS, (LETTERS,), generator=generator).tolist()
    letters = torch.randint(0, LETTERS, (4096,), generator=generator).tolist()
    follows = (torch.rand(4096, generator=generator) < 0.8).tolist()
    for i in range(1, len(letters)):
        if follows[i]:
            letters[i] = successors[letters[i - 1]]
    return torch.tensor(letters)


def make_model() -> nn.Sequential:
    """Return the model: three matrices that travel by the codec, and vectors that travel exactly."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Embedding(LETTERS, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.Tanh(),
        nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, LETTERS),
    )  # fmt: skip


def tcp_bytes() -> int:
    """Return what this process has sent over its connections to other ranks; those to the store are left out.

    Who asks the store how often depends on timing.
    """
    total, store_port = 0, int(os.environ["FARANDOLE_PORT"])
    layout, offset = _SENT_AND_RESENT_BYTES
    for descriptor, _ in open_sockets():
        with suppress(OSError), borrowed(descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if store_port in (connection.getsockname()[1], connection.getpeername()[1]):
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            sent, resent = layout.unpack_from(info, offset)
            total += sent - resent
    return total


class _ByteCounter:
    """A recorder that adds up the bytes of exchanges."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def record(self, event: Event) -> None:
        if isinstance(event, Exchange):
            self.sent_bytes += event.sent_bytes


def _pretend_hosts(training: Training) -> None:
    """Say in this rank's environment that consecutive ranks are on one host."""
    rank, each = int(os.environ["FARANDOLE_RANK"]), training.ranks // training.hosts
    values = {
        "LOCAL_RANK": rank % each,
        "LOCAL_SIZE": each,
        "NODE_RANK": rank // each,
        "NODE_COUNT": training.hosts,
    }
    os.environ.update({f"FARANDOLE_{key}": str(value) for key, value in values.items()})
