"""Codecs alone, on a device, against their eager code on the CPU: several pretend ranks in lock step.

Most of what codecs compute has one right result, which IEEE 754 fixes: there a device must have the CPU's bits.
Some operations of torch do not promise that much on every device: a division may be a product with a reciprocal,
and sums of many numbers are added in the device's own order. A codec that stands on such an operation must have
the CPU's bits where that operation alone has them on this device, and else come near: its mean has the same bits
on all ranks in any case, as all of them decode the same bytes.

What should be is computed on the CPU first, outside of `Subject.use`. A check that raises has failed, with what it
raised for its answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..comm.codecs.codec import leaves
from ..comm.codecs.registry import make_codec
from ..comm.device.accelerator import accelerators, memory_of, synchronize
from ..comm.device.tested import versions_of
from ..comm.messages import Encoding, GroupRank, as_encoding, simulate
from ..core.failures import first_line
from ..core.vocabulary.codec_spec import CodecSpec
from ..core.vocabulary.errors import ConfigError
from ..train.verify.verify import Check

ON_THE_CPU = "train on the CPU, or with another version of torch or of the driver"
WITHOUT_CODEC = f'codec = "none" in the plan; else {ON_THE_CPU}'
NEAR = 1e-3
"""Norm of a difference by that of what is compared: rounding, and the few numbers that it moves to another step of
a format."""
NEAR_PARAMETERS = 1e-5
"""The same of parameters whose gradients have equal bits: optimizers round in their own way on each device."""
_RANKS = 4
"""A power of two: a division by it is exact on every device."""
_STEPS = 3
_COUNTS = (1, 5001, 24_576)
"""Elements of a gradient: one, no whole blocks, and whole ones for every rank."""
_MATRIX = (96, 80)
_PROBED_ELEMENTS = 1 << 16
_BLOCK = 512


@dataclass(frozen=True)
class Form:
    """A codec with options."""

    text: str
    stands_on: str = ""
    """The operation that may have other bits on a device: a key of `OPERATIONS`; empty: none."""
    draws: bool = False
    """Whether it draws random numbers, which go on after a dropped step on a device, and not on the CPU."""


FORMS = (
    Form("bf16"),
    Form("fp16"),
    Form("int8", "division"),
    Form("int8:feedback=false", "division"),
    Form("int8:rounding=stochastic", "division", draws=True),
    Form("int4", "division"),
    Form("fp8", "division"),
    Form("sign", "mean of a block"),
    Form("topk:0.3,exact=true"),  # on a device the largest are taken in any case
    Form("topk:0.02,exact=true"),
    Form("topk:0.02,exact=true,momentum=0.5,clip_norm=1.0", "norm and fused sums"),
    Form("randomk:0.05", draws=True),
    Form("powersgd:2", "products of matrices"),
)
"""Every codec that runs on devices."""


def _norms(x: torch.Tensor) -> torch.Tensor:
    """Return norms of several lengths: one alone may have the same bits in two orders of addition."""
    return torch.stack([x[:length].norm() for length in range(1000, len(x), 2001)])


OPERATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # As codecs divide: by a tensor.
    "division": lambda x: torch.stack([x / torch.full_like(x, top) for top in (127.0, 7.0)]),
    "mean of a block": lambda x: x.view(-1, _BLOCK).abs().mean(1),
    "products of matrices": lambda x: torch.linalg.qr(x.view(-1, 256) @ x.view(256, -1)[:, :2])[0],
    "norm and fused sums": lambda x: torch.add(x, x.flip(0), alpha=0.9) / _norms(x)[:, None],
}
"""By name: what it makes of numbers."""


def operations_with_other_bits(device: torch.device) -> frozenset[str]:
    """Return the `OPERATIONS` whose results on `device` are not the CPU's."""
    x = torch.randn(_PROBED_ELEMENTS, dtype=torch.float32, generator=torch.Generator().manual_seed(5))
    on_device = x.to(device, copy=True)
    return frozenset(
        name for name, compute in OPERATIONS.items() if not torch.equal(compute(x), compute(on_device).cpu())
    )


def check_alone(subject: Subject) -> list[Check]:
    """Return all that one process can check."""
    checks = [_measured("versions", describe, subject), _measured("copies", describe_rates, subject)]
    with subject.use():
        other_bits = operations_with_other_bits(subject.device)
    return checks + [check_codec(subject, form, other_bits) for form in FORMS]


def _measured(name: str, describe: Callable[[torch.device], str], subject: Subject) -> Check:
    try:
        with subject.use():
            return Check(name, None, describe(subject.device), word="measured")
    except Exception as problem:  # whatever a device and its driver raise: a figure is missing, nothing is wrong
        return Check(name, None, f"not measured: {type(problem).__name__}: {first_line(problem)}")


def check_codec(subject: Subject, form: Form, other_bits: frozenset[str]) -> Check:
    """Compare one codec, as the engine runs it, with its eager code on the CPU."""
    name, by_bits = f"codec {form.text}", form.stands_on not in other_bits
    gradients = gradients_of(form)
    expected = {what: run_codec(form, rows, CPU, "eager") for what, rows in gradients.items()}
    try:
        with subject.use():
            found = {what: run_codec(form, rows, subject.device, "engine") for what, rows in gradients.items()}
    except Exception as problem:
        return Check(name, False, f"{type(problem).__name__}: {first_line(problem)}", WITHOUT_CODEC)
    for what in gradients:
        if fault := fault_of(found[what], expected[what], by_bits=by_bits):
            return Check(name, False, f"{what}: {fault}", WITHOUT_CODEC)
    tried = f"{_RANKS} ranks in lock step, {_STEPS} steps each of {len(gradients)} kinds of gradients"
    exact = "the CPU's bits"
    near = f"the CPU's to rounding, equal on all ranks ({form.stands_on}: other last bits on this device)"
    return Check(name, True, f"{tried}: {exact if by_bits else near}")


class CodecRun(NamedTuple):
    """What the steps by one codec brought, in CPU memory."""

    means: list[list[torch.Tensor]]
    """By step, and by rank or parameter."""
    residuals: list[torch.Tensor]
    """After the last step."""
    parameters: Sequence[torch.Tensor] = ()


def gradients_of(form: Form) -> dict[str, list[list[torch.Tensor]]]:
    """Return what a codec is tried on, by what it is: by step and rank, in CPU memory."""
    if CodecSpec.parse(form.text).is_low_rank:
        return {"matrix": _drawn(_MATRIX, 1.0, 1.0)}
    tried = {f"{count:,} elements": _drawn((count,), 1.0, 1.0) for count in _COUNTS}
    count = (_COUNTS[-1],)
    return tried | {
        "zeros": _drawn(count, 0.0, 1.0),
        "tiny numbers": _drawn(count, 1e-30, 1.0),
        "numbers of many magnitudes": _drawn(count, 1.0, 1e3),
    }


def _drawn(shape: tuple[int, ...], factor: float, spread: float) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)

    def one() -> torch.Tensor:
        values = torch.randn(shape, dtype=torch.float32, generator=generator) * factor
        powers = torch.rand(shape, dtype=torch.float32, generator=generator) * 2 - 1
        return values * spread**powers

    return [[one() for _ in range(_RANKS)] for _ in range(_STEPS)]


def run_codec(form: Form, gradients: Sequence[Sequence[torch.Tensor]], device: torch.device, how: str) -> CodecRun:
    """Exchange `gradients` on `device`. `how`: "engine", by what the engine runs; "eager", by the codec itself."""
    codec = make_codec(CodecSpec.parse(form.text))
    groups = [GroupRank(rank, _RANKS) for rank in range(_RANKS)]
    states = [codec.init(each.to(device), group) for each, group in zip(gradients[0], groups, strict=True)]

    def encode(unit: torch.Tensor, state: Any, group: GroupRank) -> Encoding:
        if how == "eager":
            return codec.encode(unit, state, group)
        return as_encoding(codec.exchange(unit, state, group), unit)

    means: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for rows in gradients:
            units = [row.to(device, copy=True) for row in rows]
            done = simulate([encode(*each) for each in zip(units, states, groups, strict=True)])
            states = done.states
            means.append([mean.cpu().clone() for mean in done.means])
    kept = [leaves(state).get("residual") for state in states]
    return CodecRun(means, [each.cpu().clone() for each in kept if isinstance(each, torch.Tensor)])


def fault_of(found: CodecRun, expected: CodecRun, *, by_bits: bool) -> str:
    """Return how a run differs from the one expected; empty: it does not."""
    for step, ours in enumerate(found.means):
        if unequal := first_difference(ours[1:], ours[:1] * (len(ours) - 1), near=0.0):
            return f"step {step}: ranks have different means: {unequal}"
    return difference(found, expected, by_bits=by_bits)


def difference(found: CodecRun, expected: CodecRun, *, by_bits: bool) -> str:
    """Return the first thing in which a run is not the one expected; empty: there is none."""
    near = 0.0 if by_bits else NEAR
    for step, (ours, theirs) in enumerate(zip(found.means, expected.means, strict=True)):
        if wrong := first_difference(ours, theirs, near=near):
            return f"mean of step {step}: {wrong}"
    sizes = [float(mean.double().norm()) for each in expected.means for mean in each if mean.isfinite().all()]
    if wrong := first_difference(found.residuals, expected.residuals, near=near, size=max(sizes)):
        return f"residual: {wrong}"
    wrong = first_difference(found.parameters, expected.parameters, near=NEAR_PARAMETERS if by_bits else NEAR)
    return f"parameters: {wrong}" if wrong else ""


def first_difference(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], *, near: float, size: float | None = None
) -> str:
    """Return where tensors differ; empty: nowhere. All in CPU memory.

    `near`: how large a difference may be beside `size`, by their norms; 0: bits are compared. `size`: by default
    the norm of what is expected.
    """
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors instead of {len(theirs)}"
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our.shape != their.shape:
            return f"tensor {number} has shape {tuple(our.shape)} instead of {tuple(their.shape)}"
        # Zeros of either sign are the same number, and another pattern of bits: said, where bits are compared.
        wrong = (our.view(torch.int32) != their.view(torch.int32)).flatten().nonzero().flatten()
        if not len(wrong) or bool((our.isnan() & their.isnan()).all()):
            continue
        scale = float(their.double().norm()) if size is None else size
        if near and float((our.double() - their.double()).norm()) <= near * scale:
            continue
        first = int(wrong[0])
        return (
            f"{len(wrong)} of {our.numel()} numbers of tensor {number} differ, the first is element {first}: "
            f"{our.flatten()[first].item():.9g} instead of {their.flatten()[first].item():.9g}"
        )
    return ""


# The device under test: whether it is there, and what is reported of it and not judged.


CPU = torch.device("cpu")
_COPIED_BYTES = 256 << 20
_COPIES = 5
_SHARE_OF_FREE_MEMORY = 8


@dataclass(frozen=True)
class Subject:
    """A device of this machine that is there."""

    device: torch.device

    def use(self) -> AbstractContextManager[Any]:
        """Return what is entered while the device is in use."""
        return nullcontext()


def find_devices(kind: str) -> int:
    """Return how many devices of a kind there are; raise `ConfigError`, with what torch sees, if there is none."""
    if kind == CPU.type:
        return 1
    found, count = accelerators()
    if found == kind:
        return count
    seen = f"{count} of kind {found}" if found else "no accelerator"
    toolkit = torch.version.cuda or torch.version.hip or ""
    remedy = "is its driver loaded, and the device visible (nvidia-smi, CUDA_VISIBLE_DEVICES)?"
    if found:
        remedy = f"farandole test --device {found}"
    elif not toolkit:
        remedy = "install the torch of its kind: https://pytorch.org/get-started"
    built = f"built for {toolkit}" if toolkit else "built for the CPU alone"
    raise ConfigError(f"--device {kind}: torch {torch.__version__} ({built}) sees {seen}", remedy=remedy)


def describe(device: torch.device) -> str:
    """Return versions, the device's name and its free memory."""
    words = [f"{name} {value}" for name, value in versions_of(device).items() if value]
    if device != CPU:
        memory = memory_of(device)
        known = memory and f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
        words.append(known or "memory not known")
    return ", ".join(words)


def describe_rates(device: torch.device) -> str:
    """Return the rates of copies on the device, and from it to memory of the host: pinned, where it can be."""
    memory = memory_of(device)
    nbytes = _COPIED_BYTES // 4 if memory is None else min(_COPIED_BYTES, memory.free // _SHARE_OF_FREE_MEMORY)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # A copy reads each byte and writes it.
    told = [f"{2 * _copied_per_second(device, source, target) / 1e9:.1f} GB/s of memory read and written"]
    if device != CPU:
        try:
            host, where = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), "pinned"
        except RuntimeError:
            host, where = torch.empty(nbytes, dtype=torch.uint8), "not pinned"
        told.append(f"{_copied_per_second(device, source, host) / 1e9:.1f} GB/s to the host ({where})")
        told.append(f"{_copied_per_second(device, host, source) / 1e9:.1f} GB/s from it")
    return ", ".join(told)


def _copied_per_second(device: torch.device, source: torch.Tensor, target: torch.Tensor) -> float:
    """Return bytes a second of the fastest of some copies on `device`, or from or to it."""
    best = float("inf")
    for _ in range(_COPIES):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return source.nbytes / best
