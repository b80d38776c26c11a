"""The checks of ``farandole test --device``: each compares something with the CPU, and answers in one line.

What should be is computed on the CPU first, outside of `Subject.use`. A check that raises has failed, with what it
raised for its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...comm.codecs.registry import runs_on_devices
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...train.verify.verify import Check, fingerprint
from . import facts
from .codecs_check import RANKS, STEPS, fault_of, gradients_of, run_codec
from .compare import difference, ranks_differ
from .engine import play_on_ranks
from .forms import FORMS, Form, operations_with_other_bits
from .lock_step import play_in_lock_step
from .named import first_difference, goes_by_groups, run_named
from .reference import play_reference
from .script import FULL, PLAIN, DrawnStep, Played, Script
from .subject import Subject

LOCK_STEP_RANKS = 2
_LOADED_STEPS = 20
_WITHOUT_CODEC = 'codec = "none"'
_ON_THE_CPU = "train on the CPU, or with another version of torch or of the driver"
_NO_STREAMS = "it has no streams: operations are over when they return"
Say = Callable[[str], None]


def check_alone(subject: Subject, say: Say = lambda line: None) -> list[Check]:
    """Return all that one process can check."""
    checks = [
        _measured("versions", facts.describe, subject),
        _measured("copies", facts.describe_rates, subject),
    ]
    say("codecs in lock step")
    with subject.use():
        other_bits = operations_with_other_bits(subject.device)
    checks += [check_codec(subject, form, other_bits) for form in FORMS]
    say("the engine's buckets in lock step")
    checks += [
        check_buckets(subject, other_bits, scaled=False),
        check_buckets(subject, other_bits, scaled=True),
        check_load(subject),
        check_host_waits(subject),
    ]
    return checks


def _measured(name: str, describe: Callable[[torch.device], str], subject: Subject) -> Check:
    try:
        with subject.use():
            return Check(name, None, describe(subject.device), word="measured")
    except Exception as problem:  # whatever a device and its driver raise: a figure is missing, nothing is wrong
        return Check(name, None, f"not measured: {_told(problem)}")


def check_codec(subject: Subject, form: Form, other_bits: frozenset[str]) -> Check:
    """Compare one codec, as the engine runs it, with its eager code on the CPU."""
    name, by_bits = f"codec {form.text}", form.stands_on not in other_bits
    assert runs_on_devices(form.spec), "others are refused there"
    gradients = gradients_of(form)
    cpu = torch.device("cpu")
    expected = {what: run_codec(form, rows, cpu, "eager") for what, rows in gradients.items()}
    try:
        with subject.use():
            found = {what: run_codec(form, rows, subject.device, "engine") for what, rows in gradients.items()}
    except Exception as problem:
        return _failed(name, _told(problem))
    for what in gradients:
        if fault := fault_of(found[what], expected[what], by_bits=by_bits):
            return _failed(name, f"{what}: {fault}")
    tried = f"{RANKS} ranks in lock step, {STEPS} steps each of {len(gradients)} kinds of gradients"
    return Check(name, True, f"{tried}: {_how(form, by_bits=by_bits)}")


def check_buckets(subject: Subject, other_bits: frozenset[str], *, scaled: bool) -> Check:
    """Compare pretend ranks with buckets on the device, and both waits between streams, with one process."""
    name = "loss scale, clipping, accumulation, unused, reload" if scaled else "buckets and streams"
    if not subject.has_streams:
        return Check(name, None, f"{subject.device.type}: {_NO_STREAMS}; see the engine on ranks")
    for form in _forms(scaled=scaled):
        script = script_of(form, scaled=scaled)
        expected = play_reference(script, form.spec, LOCK_STEP_RANKS, in_one_bucket=True)
        fault = _fault_in_lock_step(subject, form, script, expected, by_bits=form.stands_on not in other_bits)
        if fault:
            return _failed(name, fault)
    where = f"{LOCK_STEP_RANKS} ranks in lock step on one device, {len(_forms(scaled=scaled))} codecs"
    return Check(name, True, f"{where}: as one process on the CPU")


def script_of(form: Form, *, scaled: bool) -> Script:
    """Return the training for a codec: draws go on after a dropped step on a device, and not on the CPU."""
    script = FULL if scaled else PLAIN
    return script.without_overflow() if form.draws else script


def _forms(*, scaled: bool) -> list[Form]:
    return [form for form in FORMS if form.is_scale_free or not scaled]


def _fault_in_lock_step(
    subject: Subject,
    form: Form,
    script: Script,
    expected: list[Played],
    *,
    by_bits: bool,
    after_first: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    try:
        with subject.use():
            played = play_in_lock_step(script, form.spec, LOCK_STEP_RANKS, subject.device, after_first)
    except Exception as problem:
        return f"codec {form.text}: {_told(problem)}"
    if fault := ranks_differ(played):
        return f"codec {form.text}: {fault}"
    for rank, (ours, theirs) in enumerate(zip(played, expected, strict=True)):
        if fault := difference(ours, theirs, by_bits=by_bits):
            return f"codec {form.text}, rank {rank}: {fault}"
    return ""


def check_load(subject: Subject) -> Check:
    """Compare a device whose streams are delayed at random with itself, undisturbed."""
    name = "streams under load"
    if subject.delays(0) is None:
        return Check(name, None, f"{subject.device.type}: torch has nothing that delays a stream there")
    script = Script((DrawnStep(),) * _LOADED_STEPS)
    for seed, text in enumerate(("int8", "topk:0.02,exact=true", "powersgd:2")):
        form = next(form for form in FORMS if form.text == text)
        try:
            with subject.use():
                expected = play_in_lock_step(script, form.spec, LOCK_STEP_RANKS, subject.device)
        except Exception as problem:
            return _failed(name, f"codec {text}, without delays: {_told(problem)}")

        def delayed(seed: int = seed) -> AbstractContextManager[Any]:
            return subject.delays(seed) or nullcontext()

        if fault := _fault_in_lock_step(subject, form, script, expected, by_bits=True, after_first=delayed):
            return _failed(name, f"with delays: {fault}")
    return Check(name, True, f"{_LOADED_STEPS} steps of 3 codecs with random delays: the bits of those without")


def check_host_waits(subject: Subject) -> Check:
    """Let a host that waits for the device within a step be an error."""
    name = "no wait of the host"
    if subject.no_host_waits() is None:
        return Check(name, None, f"{subject.device.type}: torch does not look for such waits there")
    for form in FORMS:
        try:
            with subject.use():
                play_in_lock_step(
                    PLAIN,
                    form.spec,
                    LOCK_STEP_RANKS,
                    subject.device,
                    lambda: subject.no_host_waits() or nullcontext(),
                )
        except Exception as problem:
            return _failed(name, f"codec {form.text}: {_told(problem)}")
    return Check(name, True, f"{len(PLAIN.steps) - 1} steps each of {len(FORMS)} codecs")


def check_engine(subject: Subject, world: World, *, scaled: bool) -> Check:
    """Compare the whole engine on all ranks with one process; called by all ranks, who answer alike."""
    what = ": loss scale, clipping, accumulation, unused, reload" if scaled else ""
    name = f"engine on {world.size} ranks{what}"
    with subject.use():
        mine = operations_with_other_bits(subject.device)
    gathered = all_gather_json(world, "device test/operations", sorted(mine))
    other_bits = {each for row in gathered for each in row}
    for form in _forms(scaled=scaled):
        by_bits = form.stands_on not in other_bits
        script = script_of(form, scaled=scaled)
        expected = play_reference(script, form.spec, world.size, in_one_bucket=False)[world.rank]
        with subject.use():
            played = play_on_ranks(script, form.spec, world, subject.device)
        answers = [difference(played, expected, by_bits=by_bits), fingerprint(played.means)]
        rows = all_gather_json(world, "device test/answers", answers)
        for rank, (fault, means) in enumerate(rows):
            if fault or means != rows[0][1]:
                what = fault or "its means are not those of rank 0"
                return _failed(name, f"codec {form.text}, rank {rank}: {what}")
    return Check(name, True, f"{len(_forms(scaled=scaled))} codecs: as one process on the CPU")


def check_named(subject: Subject, world: World) -> Check:
    """Compare named operations of tensors on the device with those in CPU memory; called by all ranks."""
    name, cpu = f"named operations on {world.size} ranks", torch.device("cpu")
    expected = run_named(world, cpu)
    with subject.use():
        if not goes_by_groups(world, subject.device):
            return Check(name, None, f"{subject.device.type}: by CPU memory")
        found = run_named(world, subject.device)
    for rank, fault in enumerate(all_gather_json(world, "device test/named", first_difference(found, expected))):
        if fault:
            return Check(name, False, f"{fault}, rank {rank}: other bits than in CPU memory", _ON_THE_CPU)
    return Check(name, True, f"{len(found)} kinds: the bits of tensors in CPU memory")


def _how(form: Form, *, by_bits: bool) -> str:
    if by_bits:
        return "the CPU's bits"
    return f"the CPU's to rounding, equal on all ranks ({form.stands_on}: other last bits on this device)"


def _failed(name: str, answer: str) -> Check:
    return Check(name, False, answer, f"{_WITHOUT_CODEC} in the plan; else {_ON_THE_CPU}")


def _told(problem: BaseException) -> str:
    """Return the first line of an exception."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
