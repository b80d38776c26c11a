"""``farandole bench codecs``: what each codec costs, saves and loses."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..comm.codecs.registry import CodecInstance, make_codec
from ..comm.device.accelerator import is_accelerator, local_gpu, model_of, synchronize
from ..comm.messages import Exchange, Exchanged, GroupRank, Message, reduce_scatter_all_gather
from ..core.vocabulary.codec_spec import CodecSpec
from ..core.vocabulary.text import format_table
from .data import load_text
from .intervals import least_bytes, median_interval
from .models import LanguageModel

# The result of ``farandole bench codecs`` as a table.


def format_codecs(result: dict[str, Any]) -> str:
    """Return the result as a table, one for each device."""
    head = ["codec", "GB/s", "95 % interval", "sent / fp32", "relative error"]
    lines = []
    for device in dict.fromkeys(row["device"] for row in result["rows"]):
        here = [row for row in result["rows"] if row["device"] == device]
        lines.append(
            f"{device}: {here[0]['processor']}, {result['threads']} thread, {result['elements']} elements"
        )
        rows = [
            [
                row["codec"],
                f"{row['gigabytes_per_second']:.3g}",
                f"{row['interval'][0]:.3g} to {row['interval'][1]:.3g}",
                f"{row['ratio']:.4f}",
                f"{row['relative_error']:.2g}",
            ]
            for row in here
        ]
        lines.append(format_table(head, rows))
    return "\n".join(lines)


# ``farandole bench codecs``: what each codec costs, saves and loses, measured on real gradients.
#
# Two pretend ranks talk in lock step in this process, and only the work of the first is timed: encoding,
# decoding, and adding up its part of an ``all_reduce``. Copying between them stands for the network and is not
# timed. Everything runs on one thread.

RANKS = 2
SEGMENT_ELEMENTS = RANKS * 256 * 1024
"""As the engine cuts a bucket: 1 MiB for each rank to add up."""
_STEPS = 4
_BATCH = 8
_CONTEXT = 64

GROUPS = [GroupRank(rank, RANKS) for rank in range(RANKS)]


def bench_codecs(specs: Sequence[CodecSpec], *, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every codec on every device here; return the result as plain values."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gradients = model_gradients()
        rows = []
        for device in _devices():
            for spec in specs:
                say(f"{spec.to_text()} on {device}")
                rows.append(_measure(spec, gradients, device, rounds))
    finally:
        torch.set_num_threads(threads)
    elements = sum(matrix.numel() for matrix in gradients[0])
    return {"ranks": RANKS, "elements": elements, "rounds": rounds, "threads": 1, "rows": rows}


def model_gradients() -> list[list[torch.Tensor]]:
    """Return, for each pretend rank, the gradients of a language model's matrices after some steps on text."""
    torch.manual_seed(0)
    model = LanguageModel(width=128, depth=4, heads=4, context=_CONTEXT)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    training, _ = load_text(context=_CONTEXT, limit_bytes=200_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(turn: int) -> None:
        optimizer.zero_grad()
        pairs = [training[turn * _BATCH + i] for i in range(_BATCH)]
        inputs, targets = (torch.stack(each) for each in zip(*pairs, strict=True))
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()

    for turn in range(_STEPS):
        backward(turn)
        optimizer.step()
    found = []
    for rank in range(RANKS):
        backward(_STEPS + rank)
        found.append([parameter.grad.clone() for parameter in matrices if parameter.grad is not None])
    return found


@dataclass
class _Turn:
    """What one step over all units took and gave."""

    seconds: float = 0.0
    sent_bytes: int = 0
    means: list[torch.Tensor] = field(default_factory=list)


def _measure(
    spec: CodecSpec, gradients: list[list[torch.Tensor]], device: torch.device, rounds: int
) -> dict[str, Any]:
    codec = make_codec(spec)
    units = [_units(grads, codec.granularity, device) for grads in gradients]
    states = [[codec.init(unit, group) for unit in each] for each, group in zip(units, GROUPS, strict=True)]
    first = _step(codec, units, states)
    turns = [_step(codec, units, states) for _ in range(rounds)]
    byte_count = 4 * sum(each.numel() for each in units[0])
    seconds, interval = median_interval([turn.seconds for turn in turns])
    true = torch.cat([torch.stack(each).mean(0).flatten() for each in zip(*units, strict=True)])
    mean = torch.cat([each.flatten() for each in first.means])
    return {
        "codec": spec.to_text(),
        "device": str(device),
        "processor": _processor(device),
        "gigabytes_per_second": byte_count / seconds / 1e9,
        "interval": [byte_count / value / 1e9 for value in reversed(interval)],
        "ratio": statistics.median(turn.sent_bytes for turn in turns)
        / least_bytes("all_reduce", byte_count, RANKS),
        "relative_error": float((mean - true).norm() / true.norm()),
    }


def _units(gradients: Sequence[torch.Tensor], granularity: str, device: torch.device) -> list[torch.Tensor]:
    if granularity == "matrix":
        return [gradient.to(device) for gradient in gradients]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return list(flat.to(device).split(SEGMENT_ELEMENTS))


@torch.no_grad()
def _step(codec: CodecInstance, units: list[list[torch.Tensor]], states: list[list[Any]]) -> _Turn:
    """Exchange every unit once; replace `states` by those of the next step."""
    turn = _Turn()
    for index in range(len(units[0])):
        given = [units[rank][index].clone() for rank in range(RANKS)]
        exchanges = [
            _in_parts(codec.exchange(unit, states[group.rank][index], group), group)
            for unit, group in zip(given, GROUPS, strict=True)
        ]
        for rank, result in enumerate(_drive(exchanges, turn, units[0][index].device)):
            states[rank][index] = result.state
        turn.means.append(given[0])
    return turn


def _drive(exchanges: Sequence[Exchange], turn: _Turn, device: torch.device) -> list[Exchanged]:
    """Drive both ranks to their end; time the first."""
    received: list[torch.Tensor | None] = [None] * RANKS
    while True:
        synchronize(device)
        begin = time.perf_counter()
        first = _next(exchanges[0], received[0])
        synchronize(device)
        turn.seconds += time.perf_counter() - begin
        second = _next(exchanges[1], received[1])
        if not isinstance(first, Message) or not isinstance(second, Message):
            assert not isinstance(first, Message), "both ranks yield as many messages"
            assert not isinstance(second, Message), "both ranks yield as many messages"
            return [first, second]
        size = first.tensor.numel() * first.tensor.element_size()
        gathers = first.operation == "all_gather"
        turn.sent_bytes += size if gathers else size // RANKS
        both = (first.tensor, second.tensor)
        for rank in range(RANKS):
            received[rank] = torch.stack(both if gathers else [each[rank] for each in both])


def _next(exchange: Exchange, received: torch.Tensor | None) -> Message | Exchanged:
    try:
        return next(exchange) if received is None else exchange.send(received)
    except StopIteration as end:
        result: Exchanged = end.value
        return result


def _in_parts(exchange: Exchange, group: GroupRank) -> Exchange:
    """Let all-reduces travel as they do between hosts: each rank adds its part up, then all gather."""
    received: torch.Tensor | None = None
    while True:
        produced = _next(exchange, received)
        if not isinstance(produced, Message):
            return produced
        if produced.operation == "all_reduce":
            received = yield from reduce_scatter_all_gather(produced.tensor, group)
        else:
            received = yield produced


def _devices() -> list[torch.device]:
    gpu = local_gpu(0)
    return [torch.device("cpu"), *([] if gpu is None else [gpu])]


def _processor(device: torch.device) -> str:
    if is_accelerator(device):
        return model_of(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
