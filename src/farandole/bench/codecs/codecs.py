"""``farandole bench codecs``: what each codec costs, saves and loses, measured on real gradients.

Two pretend ranks talk in lock step in this process, and only the work of the first is timed: encoding,
decoding, and adding up its part where a codec says ``sum``. Copying between them stands for the network and
is not timed. Everything runs on one thread.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...comm.codecs.registry import make_codec
from ...comm.messages.message import Encoding, GroupRank, Message, State, sum_by_parts
from ...comm.messages.simulator import landing
from ...core.vocabulary.codec_spec import CodecSpec
from ..data.text import load_text
from ..measure.intervals import median_interval
from ..measure.link import least_bytes
from ..models.language import LanguageModel

RANKS = 2
SEGMENT_ELEMENTS = RANKS * 256 * 1024
"""As the engine cuts a bucket: 1 MiB for each rank to add up."""
_STEPS = 4
_BATCH = 8
_CONTEXT = 64

Begin = Callable[[torch.Tensor, State, GroupRank], Encoding]


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
    unit, begin = _begin(spec)
    units = [_units(grads, unit, device) for grads in gradients]
    states: list[list[State]] = [[{} for _ in each] for each in units]
    first = _step(begin, units, states)
    turns = [_step(begin, units, states) for _ in range(rounds)]
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


def _begin(spec: CodecSpec) -> tuple[str, Begin]:
    if spec.name == "none":
        return "segment", _plain
    made = make_codec(spec)
    return made.unit, lambda grad, state, seat: landing(made.exchange(grad, state, seat), grad)


def _plain(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
    total = yield Message(grad, "sum")
    return total.div_(seat.size), grad


def _units(gradients: Sequence[torch.Tensor], unit: str, device: torch.device) -> list[torch.Tensor]:
    if unit == "matrix":
        return [gradient.to(device) for gradient in gradients]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return list(flat.to(device).split(SEGMENT_ELEMENTS))


@torch.no_grad()
def _step(begin: Begin, units: list[list[torch.Tensor]], states: list[list[State]]) -> _Turn:
    """Exchange every unit once, with the states kept between steps."""
    turn = _Turn()
    for index in range(len(units[0])):
        talks = [
            _in_parts(
                begin(units[rank][index].clone(), states[rank][index], GroupRank(rank, RANKS)),
                GroupRank(rank, RANKS),
            )
            for rank in range(RANKS)
        ]
        turn.means.append(_talk(talks, turn, units[0][index].device))
    return turn


def _talk(talks: Sequence[Encoding], turn: _Turn, device: torch.device) -> torch.Tensor:
    """Drive both ranks to their end; time the first."""
    answers: list[torch.Tensor | None] = [None] * RANKS
    while True:
        _synchronise(device)
        begin = time.perf_counter()
        mine = _next(talks[0], answers[0])
        _synchronise(device)
        turn.seconds += time.perf_counter() - begin
        theirs = _next(talks[1], answers[1])
        if not isinstance(mine, Message) or not isinstance(theirs, Message):
            assert not isinstance(mine, Message), "both ranks say as much"
            return mine[0]
        size = mine.tensor.numel() * mine.tensor.element_size()
        turn.sent_bytes += size if mine.operation == "gather" else size // RANKS
        both = (mine.tensor, theirs.tensor)
        for rank in range(RANKS):
            answers[rank] = torch.stack(both if mine.operation == "gather" else [each[rank] for each in both])


def _next(talk: Encoding, answer: torch.Tensor | None) -> Message | tuple[torch.Tensor, torch.Tensor]:
    try:
        return next(talk) if answer is None else talk.send(answer)
    except StopIteration as end:
        result: tuple[torch.Tensor, torch.Tensor] = end.value
        return result


def _in_parts(
    encoding: Encoding, seat: GroupRank
) -> Generator[Message, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Let sums travel as they do on the wire: each rank adds its part up, then all gather."""
    answer: torch.Tensor | None = None
    while True:
        produced = _next(encoding, answer)
        if not isinstance(produced, Message):
            return produced
        if produced.operation == "sum":
            answer, _ = yield from sum_by_parts(produced.tensor, seat)
        else:
            answer = yield produced


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
