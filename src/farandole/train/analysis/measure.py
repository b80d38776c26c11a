"""Seconds of a model's units on this machine: passes of the model itself, timed by its parts.

[Note: a model that is timed] Of blocks that are alike two are run, and the others skipped. If the whole model does
not fit, only what is run has memory, and parameters are random: their shapes matter alone. In the backward pass a
part begins when the gradient of its output is there.

[Note: a machine that is not alone] Other programs, and other virtual machines, slow a machine down for seconds.
So sizes are interleaved, for some seconds, and medians are taken over all of them.

[Note: fixed and per sample] A unit's seconds are fitted as fixed + samples x per sample, both not negative, to the
medians of each size, weighted by their inverse: what a launch costs does not vanish in a large batch.

Ranks of one host share its caches, its memory and its clock: a pass that is timed while the other cores sleep is
faster than any in training.
"""

from __future__ import annotations

import os
import platform
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...comm.device.accelerator import synchronize
from ...core.host.process_status import CoreTime, busy_machines
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import format_bytes
from ...plan.profile import ModelProfile, ModelUnit, UnitTimes
from .find_micro_batch import available_bytes
from .probe import make_on_meta
from .repeated_blocks import foldable, skipped
from .spans import PassSpans
from .units import UnitPart, find_parts
from .user_code import Batches, Loss, batch_in, errors_of_user, forward_loss

# Processes that compute beside what is timed, as the other ranks of a host will.
_WIDTH, _ROWS = 512, 1024
START_SECONDS = 60.0
"""How long a neighbour may take to import torch."""


@contextmanager
def neighbours(count: int, threads: int) -> Iterator[None]:
    """Let `count` processes compute with `threads` each, as far as there are cores for them.

    A neighbour that does not start is left out. They end with this process, however it ends.
    """
    count = max(0, min(count, len(os.sched_getaffinity(0)) // threads - 1))
    command = [sys.executable, "-m", __name__, str(threads)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        while len(running) < count:
            running += [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)]
        for each in running:
            assert each.stdout is not None, "it has a pipe"
            if select.select([each.stdout], [], [], START_SECONDS)[0]:
                each.stdout.read(1)
        yield
    finally:
        for each in running:
            each.kill()
            each.communicate()


def main() -> None:
    """Compute forward and backward of a layer until stdin ends, which it does with the parent."""
    import torch
    from torch import nn

    torch.set_num_threads(int(sys.argv[1]))
    layer = nn.Linear(_WIDTH, _WIDTH)
    x = torch.ones(_ROWS, _WIDTH, dtype=torch.float32, device="cpu", requires_grad=True)
    sys.stdout.write(".")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        nn.functional.gelu(layer(x)).sum().backward()


ROUNDS, FEWEST = 7, 3
"""Rounds, each a timed pass of every size, after one that is not timed; and the fewest where they take long."""
LEAST_SECONDS, SECONDS = 5.0, 60.0
"""Until when rounds go on, even if there are enough, and when they end if there are the fewest."""
_MOST_ROUNDS = 200
_STEP_FACTOR = 2
"""Bytes of weights and gradients, for each of parameters."""
_NOTCH = 1.57
"""Half of the interval of a median is this x the range of the middle half / sqrt(n) (McGill et al. 1978)."""
_NORMAL = 1.349
"""Range of the middle half of normal numbers, in standard deviations."""


@dataclass(frozen=True)
class Timing:
    """What is timed, and beside what."""

    make_model: Callable[[], nn.Module]
    batches: Batches
    loss: Loss | None
    device: str
    threads: int | None = None
    """Compute threads: those that a rank would have; None: those of this process."""
    neighbours: int = 0
    """How many other ranks this host will have: as many processes compute meanwhile, as far as there are cores."""


def measure_units(profile: ModelProfile, timing: Timing) -> ModelProfile:
    """Return `profile` with the seconds of its units on this machine: each distinct one runs forward and backward.

    Two of alike blocks run; where the model does not fit its parameters are random.

    Raises:
        ConfigError: what is run does not fit into memory, or the user's functions fail.
    """
    model, left_out = _make(profile, timing)
    sizes = _sizes(profile, model, left_out, timing.device)
    begin = CoreTime.now()
    with _threads(timing.threads) as threads, neighbours(timing.neighbours, threads):
        kept, blocks = foldable(model)
        if left_out:
            with skipped(kept[0][1], blocks):
                timed = _time_all(profile, model, sizes, timing, {kept[-1][0]: len(blocks)})
        else:
            timed = _time_all(profile, model, sizes, timing, {})
    units = tuple(
        replace(unit, times=_times(sizes, [each[number] for each in timed], threads))
        for number, unit in enumerate(profile.units)
    )
    measured = {
        "host": platform.node(),
        "threads": str(threads),
        "device": timing.device,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }
    if busy := busy_machines([CoreTime.now().since(begin)]):
        measured["busy"] = busy
        write_notice(f"warning: {busy}")
    return replace(profile, units=units, measured=measured)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return what is fixed and what each sample adds, neither negative; see [Note: fixed and per sample].

    >>> [round(each, 6) for each in fit([1, 2, 4], [0.3, 0.5, 0.9])]
    [0.1, 0.2]
    """
    weights = [1 / max(each, 1e-12) ** 2 for each in seconds]
    total = sum(weights)
    size = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (n - size) ** 2 for w, n in zip(weights, sizes, strict=True))
    both = sum(w * (n - size) * (t - mean) for w, n, t in zip(weights, sizes, seconds, strict=True))
    slope = both / spread if spread > 0 else 0.0
    if slope <= 0:
        return mean, 0.0
    if mean - slope * size < 0:
        squares = sum(w * n * n for w, n in zip(weights, sizes, strict=True))
        products = sum(w * n * t for w, n, t in zip(weights, sizes, seconds, strict=True))
        return 0.0, products / squares
    return mean - slope * size, slope


class _TimedSpans(PassSpans):
    """Spans with the times at which they begin, forward and backward."""

    def __init__(self, model: nn.Module, wait: Callable[[], None]) -> None:
        super().__init__(model)
        self.begins: list[float] = []
        self.backward: list[tuple[float, int]] = []
        """When the gradient of the output of a span was there, and the number of the span."""
        self._wait = wait

    def _open(self, span: Any) -> None:
        self._wait()
        super()._open(span)
        self.begins.append(time.perf_counter())

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        number = len(self.all) - 1
        if self._depth == 1:
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _, at=number: self.stamp(at))
        super()._leave(module, arguments, output)

    def stamp(self, number: int) -> None:
        """Note that from now on the backward pass is that of span `number`."""
        self._wait()
        self.backward.append((time.perf_counter(), number))

    def seconds(self, forward_end: float, end: float) -> list[tuple[float, float]]:
        """Return the seconds of each span, forward and backward."""
        ends = [*self.begins[1:], forward_end]
        found = [[stop - start, 0.0] for start, stop in zip(self.begins, ends, strict=True)]
        stops = [*(each for each, _ in self.backward[1:]), end]
        for (start, number), stop in zip(self.backward, stops, strict=True):
            found[number][1] += stop - start
        return [(forward, backward) for forward, backward in found]


_Sample = tuple[float, float]


def _time_all(
    profile: ModelProfile, model: nn.Module, sizes: Sequence[int], timing: Timing, left_out: Mapping[str, int]
) -> list[list[list[_Sample]]]:
    """Return of each size and unit the seconds of its passes. See [Note: a machine that is not alone]."""
    batches = {size: batch_in(None, timing.batches.of(size), timing.device) for size in sizes}
    found: list[list[list[_Sample]]] = [[[] for _ in profile.units] for _ in sizes]
    begin = time.perf_counter()
    for done in range(_MOST_ROUNDS + 1):
        for of_units, size in zip(found, sizes, strict=True):
            seconds = _time(profile, model, batches[size], size, timing, left_out=left_out)
            if done:
                for samples, each in zip(of_units, seconds, strict=True):
                    samples.append(each)
        spent = time.perf_counter() - begin
        if (done >= ROUNDS and spent > LEAST_SECONDS) or (done >= FEWEST and spent > SECONDS):
            break
    return found


def _time(
    profile: ModelProfile, model: nn.Module, batch: Any, size: int, timing: Timing, *, left_out: Mapping[str, int]
) -> list[_Sample]:
    """Return of each unit the seconds of forward and backward of one pass with `size` samples."""
    spans = _TimedSpans(model, partial(synchronize, torch.device(timing.device)))
    with errors_of_user(f"a pass with {size} samples"):
        with spans.watching():
            scalar = forward_loss(model, batch, timing.loss, device=timing.device, precision="fp32")
        forward_end = time.perf_counter()
        spans.stamp(len(spans.all) - 1)
        scalar.backward()
    spans.stamp(len(spans.all) - 1)
    seconds = spans.seconds(forward_end, time.perf_counter())
    del scalar
    model.zero_grad(set_to_none=False)  # gradients stay where they are, as those in buckets do
    found = []
    for unit in _by_unit(profile.units, find_parts(model, spans, {}, left_out)):
        of_parts = [(part.times, [seconds[number] for number in part.spans]) for part in unit]
        total = sum(times for times, _ in of_parts) or 1
        found.append((
            sum(times * sum(each[0] for each in spent) for times, spent in of_parts) / total,
            sum(times * sum(each[1] for each in spent) for times, spent in of_parts) / total,
        ))  # fmt: skip
    return found


def _by_unit(units: Sequence[ModelUnit], parts: Sequence[UnitPart]) -> list[list[UnitPart]]:
    """Return the parts of each unit: a unit goes from the part of its name to that of the next one."""
    found: list[list[UnitPart]] = [[] for _ in units]
    at = 0
    for number, part in enumerate(parts):
        if number and at + 1 < len(units) and part.name == units[at + 1].name:
            at += 1
        found[at].append(part)
    return found


def _times(sizes: Sequence[int], samples: Sequence[Sequence[_Sample]], threads: int) -> UnitTimes:
    """Return the fit of what was measured: of each size, forward and backward of all passes."""
    medians = [[statistics.median(sample[way] for sample in of_size) for of_size in samples] for way in (0, 1)]
    (forward, forward_sample), (backward, backward_sample) = (fit(sizes, each) for each in medians)
    middles = [_middle_half([sum(sample) for sample in of_size]) for of_size in samples]
    return UnitTimes(
        forward_fixed_seconds=forward,
        forward_sample_seconds=forward_sample,
        backward_fixed_seconds=backward,
        backward_sample_seconds=backward_sample,
        samples=tuple(sizes),
        threads=threads,
        spread=max(_spread([sum(sample) for sample in of_size]) for of_size in samples),
        jitter=statistics.median(middles) / _NORMAL,
    )


def _spread(seconds: Sequence[float]) -> float:
    return float(_NOTCH * _middle_half(seconds) / len(seconds) ** 0.5)


def _middle_half(seconds: Sequence[float]) -> float:
    """Return the range of the middle half as a share of the median; 0 where there are too few to tell."""
    median = statistics.median(seconds)
    if len(seconds) < FEWEST or median <= 0:
        return 0.0
    first, _, third = statistics.quantiles(seconds, n=4)
    return (third - first) / median


def _make(profile: ModelProfile, timing: Timing) -> tuple[nn.Module, list[nn.Module]]:
    """Return the model with memory, and the blocks of it that have none; see [Note: a model that is timed]."""
    weights = profile.memory.weights["fp32"].weight_bytes
    have = available_bytes(1) if timing.device == "cpu" else None
    if have is None or _STEP_FACTOR * weights < have / 2:
        with errors_of_user("making the model"):
            model = timing.make_model().to(timing.device)
        return model, foldable(model)[1]
    model = make_on_meta(timing.make_model, [])
    _, left_out = foldable(model)
    needed = _STEP_FACTOR * sum(each.nbytes for each in _kept_parameters(model, left_out))
    if needed > have:
        raise ConfigError(
            f"measure: the parts of the model that are run need {format_bytes(needed)}: there are "
            f"{format_bytes(have)}",
            remedy="measure on a machine with more memory, or leave measure out",
        )
    without = {module for block in left_out for module in block.modules()}
    made: dict[int, torch.Tensor] = {}
    for module in (each for each in model.modules() if each not in without):
        named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in named:
            if id(tensor) not in made:
                made[id(tensor)] = _filled(tensor, timing.device)
            setattr(module, name, made[id(tensor)])
    return model, left_out


def _filled(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor with memory for one without: small numbers for a parameter, zeros for a buffer."""
    made: torch.Tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return made
    if made.is_floating_point():
        made.uniform_(-0.02, 0.02)
    return nn.Parameter(made, tensor.requires_grad)


def _kept_parameters(model: nn.Module, left_out: Sequence[nn.Module]) -> list[nn.Parameter]:
    without = {id(each) for block in left_out for each in block.parameters()}
    return [each for each in model.parameters() if id(each) not in without]


def _sizes(profile: ModelProfile, model: nn.Module, left_out: Sequence[nn.Module], device: str) -> list[int]:
    """Return the numbers of samples to measure: those that fit of three around the example's."""
    n = profile.samples
    sizes = [n, 2 * n, 4 * n] if n <= 4 else [max(2, n // 4), n // 2, n]
    have = available_bytes(1) if device == "cpu" else None
    if have is None:
        return sizes
    saved = sum(min(unit.count, 2) * unit.saved_bytes for unit in profile.units)
    states = _STEP_FACTOR * sum(each.nbytes for each in _kept_parameters(model, left_out))
    fitting = [size for size in sizes if states + 2 * saved * size < have]
    if not fitting:
        raise ConfigError(
            f"measure: {sizes[0]} samples need about {format_bytes(round(states + 2 * saved * sizes[0]))}: there "
            f"are {format_bytes(have)}",
            remedy="let the batch have fewer samples, or leave measure out",
        )
    return fitting


@contextmanager
def _threads(wanted: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    if wanted is not None and wanted < 1:
        raise ConfigError(f"measure: threads = {wanted}, expected at least 1")
    try:
        torch.set_num_threads(wanted or before)
        yield wanted or before
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()
