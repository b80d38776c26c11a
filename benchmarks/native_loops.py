"""The quantised codecs by native loops beside the eager code, interleaved, on one core.

    taskset -c 0 python benchmarks/native_loops.py

Two pretend ranks exchange a tensor in segments, as the engine cuts a bucket; only the work of the first is
counted: encoding with error feedback, adding its piece up, landing the mean. Copying between the ranks stands for
the network and is not counted. Printed are medians in ms of processor time and GB/s of float32, and eager over
native. The last lines are the sum of two rows in place, as shared memory does it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from farandole.comm.codecs.registry import CodecInstance, make_codec
from farandole.comm.codecs.units import SEGMENT_ELEMENTS
from farandole.comm.messages import Exchange, Exchanged, GroupRank, Message
from farandole.comm.native.build import loops
from farandole.comm.transport.shared_tensor import PIECE_BYTES
from farandole.core.vocabulary.codec_spec import CodecSpec
from shared import medians_ms, read_options, report, take_turns, timed

RANKS = 2


class Side:
    """Both ranks' gradients and states, exchanged one way."""

    def __init__(self, made: CodecInstance, elements: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.made = made
        self.given = [torch.randn(elements, generator=generator) * 1e-3 for _ in range(RANKS)]
        self.used = [given.clone() for given in self.given]
        self.states = [
            [made.init(unit, GroupRank(rank, RANKS)) for unit in given.split(RANKS * SEGMENT_ELEMENTS)]
            for rank, given in enumerate(self.given)
        ]

    def step(self) -> float:
        """Exchange everything once; return the processor's seconds of rank 0's own work."""
        for used, given in zip(self.used, self.given, strict=True):
            used.copy_(given)
        seconds = 0.0
        for index, units in enumerate(
            zip(*(used.split(RANKS * SEGMENT_ELEMENTS) for used in self.used), strict=True)
        ):
            talks = [
                self.made.exchange(unit, self.states[rank][index], GroupRank(rank, RANKS))
                for rank, unit in enumerate(units)
            ]
            answers: list[torch.Tensor | None] = [None] * RANKS
            while True:
                begin = time.thread_time()
                first = step(talks[0], answers[0])
                seconds += time.thread_time() - begin
                second = step(talks[1], answers[1])
                if not isinstance(first, Message) or not isinstance(second, Message):
                    for rank, result in enumerate((first, second)):
                        assert isinstance(result, Exchanged), "both ranks send as many messages"
                        self.states[rank][index] = result.state
                    break
                both = [first.tensor, second.tensor]
                for rank in range(RANKS):
                    rows = both if first.operation == "all_gather" else [each[rank] for each in both]
                    answers[rank] = torch.stack(rows)
        return seconds


def step(talk: Exchange, answer: torch.Tensor | None) -> Message | Exchanged:
    """Return what a rank sends next, or its result."""
    try:
        return next(talk) if answer is None else talk.send(answer)
    except StopIteration as end:
        result: Exchanged = end.value
        return result


def sums(elements: int, samples: int) -> dict[str, list[float]]:
    """Return the processor's seconds of summing two rows into both, native and eager."""
    parts = [torch.zeros(elements), torch.zeros(elements)]
    pieces = list(zip(*(part.split(PIECE_BYTES // 4) for part in parts), strict=True))
    native = loops()
    assert native is not None
    add_up = native.row_sum(parts)

    def eager() -> None:
        for mine, other in pieces:
            mine.add_(other)
            other.copy_(mine)

    def floor() -> None:
        for part in parts:
            part.mul_(1)

    ways = {"native": lambda: add_up(2), "eager": eager, "floor": floor}
    return take_turns({name: timed(way, clock=time.thread_time) for name, way in ways.items()}, samples, warm_up=0)


def main() -> None:
    arguments = read_options(__doc__, mb=110.0, samples=9, codecs=["int8", "int4", "bf16", "fp16"])
    torch.set_num_threads(1)
    elements = int(arguments.mb * 1e6 / 4) // (1024 * RANKS) * 1024 * RANKS
    for text in arguments.codecs:
        made = make_codec(CodecSpec.parse(text))
        if made.native is None:
            raise SystemExit("no native loops here (is there a compiler, and FARANDOLE_NATIVE not 0?)")
        sides = {"native": Side(made, elements), "eager": Side(replace(made, native=None), elements)}
        show(text, elements, take_turns({name: side.step for name, side in sides.items()}, arguments.samples))
    for megabytes in (0.5, 12.5, 50):
        count = int(megabytes * 1e6 / 4)
        show(f"sum of 2 rows of {megabytes} MB", 2 * count, sums(count, 8 * arguments.samples))


def show(what: str, elements: int, times: Mapping[str, list[float]]) -> None:
    """Report medians of processor seconds."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    report({
        "what": what,
        "median_processor_ms": medians_ms(times, 3),
        "gigabytes_per_second": {name: round(4e-9 * elements / seconds, 2) for name, seconds in medians.items()},
        "eager_over_native": round(medians["eager"] / medians["native"], 2),
    })  # fmt: skip


if __name__ == "__main__":
    main()
