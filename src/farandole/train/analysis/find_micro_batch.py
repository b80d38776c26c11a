"""`fd.find_micro_batch`: the largest micro-batch that fits, and the accumulation that keeps the global batch."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch import nn

from ...comm.world.store_sync import all_gather_json, require_same
from ...comm.world.world import World, has_world, world
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.units import format_seconds
from ...launch.doctor.facts import read_memory
from ...plan.memory import PRECISIONS, RECOMPUTE
from ...plan.memory_page import MicroBatchRequest
from .trial import MODULE, TrialRequest, TrialResult
from .user_code import read_shape

_TOPIC = "fd.find_micro_batch"
TRIAL_SECONDS = 120.0
"""How long one trial may take, with the start of its process."""


class MicroBatch(NamedTuple):
    """How a global batch is divided: ``micro_batch * ranks * accumulate`` samples in a step."""

    micro_batch: int
    """Samples of one backward pass of one rank."""
    accumulate: int
    """Backward passes of a step, for the plan's key of that name or `fd.accumulate`."""
    ranks: int
    trials: tuple[TrialResult, ...]
    """What this rank tried."""


def find_micro_batch(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    *,
    global_batch: int,
    limit_bytes: int | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    **options: Any,
) -> MicroBatch:
    """Find the largest micro-batch whose training step fits into memory. Call it on all ranks.

    Each size is tried in a process of its own, in two steps of the optimizer: one that is killed, runs out of
    memory or takes too long does not fit, and harms nothing else. Sizes are the divisors of a rank's share of the
    global batch, so that the mean gradient stays the one of `global_batch` samples. Ranks try at the same time, as
    they train at the same time, and take the smallest of their answers.

    Args:
        make_model: returns the model; defined at the top level of a module or script, as the process imports it.
            A script that trains does so behind ``if __name__ == "__main__":``.
        make_batch: from the number of samples to a batch: a tensor, a sequence of positional arguments of the
            model, or a mapping of keyword arguments. Defined like `make_model`.
        global_batch: samples of one step of the optimizer, over all ranks and passes; ranks that
            see the same samples count once.
        limit_bytes: memory of a rank. On a CPU its resident memory, by default what the host or container has
            available, divided by the ranks of the host; on an accelerator torch's, by default all that is free.
        loss: from what the model returns, and the batch, to a scalar; by default the sum of what it returns.
        options: ``optimizer``, a name as in ``farandole estimate`` ("adamw"); ``precision`` ("fp32") and
            ``recompute`` ("none"), as there; ``trial_seconds``, the time of one trial (120).

    Raises:
        ConfigError: on every rank: the global batch is not divisible by the ranks, the smallest micro-batch does
            not fit, a function cannot be imported, or it fails.
        Mismatch: on every rank: the ranks disagree on `global_batch`.
    """
    if getattr(sys.modules["__main__"].__spec__, "name", "") == MODULE:
        raise ConfigError(
            "find_micro_batch was called while a trial imported the module of the model",
            remedy='put what trains behind: if __name__ == "__main__":',
        )
    here = world() if has_world() else None
    if here is not None:
        require_same(here, _TOPIC, [("global_batch", global_batch)])
    ranks = here.sample_size if here is not None else 1
    trials: list[TrialResult] = []
    found, problem = 0, ""
    functions = {"model": make_model, "batch": make_batch, "loss": loss}
    try:
        request, seconds = _request(here, functions, limit_bytes, options)
        trials = largest_that_fits(request, micro_batches(global_batch, ranks), trial_seconds=seconds)
        found = max(trial.samples for trial in trials if trial.fits)
    except ConfigError as error:
        if here is None:
            raise
        problem = str(error)
    if here is not None:
        answers = all_gather_json(here, _TOPIC, [found, problem])
        for rank, (_, text) in enumerate(answers):
            if text:
                raise ConfigError(f"rank {rank}: {text}")
        found = min(size for size, _ in answers)
    return MicroBatch(found, global_batch // (found * ranks), ranks, tuple(trials))


def find_by_names(request: MicroBatchRequest, *, heard: Callable[[str], None]) -> dict[str, Any]:
    """Search in this process alone, for functions that a command line names; `heard` is told each trial.

    Returns the fields of `MicroBatch` by name. Raises `ConfigError`.
    """
    limit_bytes = request.limit_bytes
    if limit_bytes is None and request.device == "cpu":
        limit_bytes = available_bytes(1)
    for text in request.inputs:
        read_shape(text)
    fields: dict[str, Any] = dataclasses.asdict(request)
    global_batch, ranks = fields.pop("global_batch"), fields.pop("ranks")
    path = (str(Path.cwd()), *(each for each in sys.path if each))
    trials = largest_that_fits(
        TrialRequest(**{**fields, "limit_bytes": limit_bytes, "samples": 0, "path": path}),
        micro_batches(global_batch, ranks),
        trial_seconds=TRIAL_SECONDS,
        heard=lambda trial: heard(trial.to_text()),
    )
    found = max(trial.samples for trial in trials if trial.fits)
    return {
        "micro_batch": found,
        "accumulate": global_batch // (found * ranks),
        "ranks": ranks,
        "memory_bytes": limit_bytes,
        "trials": [dataclasses.asdict(trial) for trial in trials],
    }


def available_bytes(ranks_of_host: int) -> int | None:
    """Return the memory that one of so many processes may take on this host now; None if it is unknown."""
    available = read_memory()["memory_available_bytes"]
    return None if available is None else available // ranks_of_host


def _request(
    here: World | None,
    functions: dict[str, Callable[..., Any] | None],
    limit_bytes: int | None,
    options: dict[str, Any],
) -> tuple[TrialRequest, float]:
    """Return the trial without its samples, and its seconds."""
    known = {"optimizer": "adamw", "precision": "fp32", "recompute": "none", "trial_seconds": TRIAL_SECONDS}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(f"find_micro_batch: {unknown[0]} is not known; known: {', '.join(known)}")
    chosen = {**known, **options}
    for name, values in (("precision", PRECISIONS), ("recompute", RECOMPUTE)):
        if chosen[name] not in values:
            raise ConfigError(f"find_micro_batch: {name} = {chosen[name]!r}, expected one of {', '.join(values)}")
    seconds = float(chosen.pop("trial_seconds"))
    if not seconds > 0:
        raise ConfigError(f"find_micro_batch: trial_seconds = {seconds}, expected a number above 0")
    device = str(here.device) if here is not None else "cpu"
    if limit_bytes is None and device == "cpu":
        limit_bytes = available_bytes(here.local_size if here is not None else 1)
    names: dict[str, Any] = {name: text_of(each, name) for name, each in functions.items() if each is not None}
    request = TrialRequest(
        samples=0,
        device=device,
        limit_bytes=limit_bytes,
        path=(str(Path.cwd()), *(each for each in sys.path if each)),
        **names,
        **chosen,
    )
    return request, seconds


def text_of(function: Callable[..., Any], what: str) -> str:
    """Return how another process finds a function: ``module:name`` or ``file.py:name``. Raises `ConfigError`."""
    name, module = getattr(function, "__qualname__", "<"), getattr(function, "__module__", None)
    home = sys.modules.get(module) if module else None
    file = getattr(home, "__file__", None)
    if "<" in name or home is None or (module == "__main__" and file is None):
        raise ConfigError(
            f"find_micro_batch: the function for the {what} cannot be imported by another process",
            remedy="define it with def at the top level of a module or script",
        )
    return f"{Path(file).resolve()}:{name}" if module == "__main__" and file else f"{module}:{name}"


# The largest micro-batch that fits, by trials in processes of their own: doubling, then bisection.


Heard = Callable[[TrialResult], None]


def micro_batches(global_batch: int, ranks: int) -> list[int]:
    """Return the micro-batches with which ``micro_batch * ranks * accumulate`` is the global batch.

    Raises `ConfigError` if the global batch is not divisible by the ranks.
    """
    if global_batch < 1:
        raise ConfigError(f"find_micro_batch: global_batch = {global_batch}, expected at least 1")
    share, rest = divmod(global_batch, ranks)
    if rest:
        below, above = share * ranks, (share + 1) * ranks
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"find_micro_batch: global_batch = {global_batch} is not divisible by {ranks} ranks",
            remedy=f"take {near}, or another number of ranks",
        )
    return [size for size in range(1, share + 1) if share % size == 0]


def largest_that_fits(
    request: TrialRequest, sizes: list[int], *, trial_seconds: float, heard: Heard | None = None
) -> list[TrialResult]:
    """Try some of `sizes`, ascending, and return all trials; the largest that fits is the answer.

    Takes it for granted that what fits fits with a smaller size too. Raises `ConfigError` if the smallest size
    does not fit, or fails for another reason than memory. A larger size that fails does not fit, for any reason.
    """
    trials: list[TrialResult] = []

    def fits(position: int) -> bool:
        result = run_in_child(replace(request, samples=sizes[position]), trial_seconds)
        trials.append(result)
        if heard is not None:
            heard(result)
        return result.fits

    if not fits(0):
        first = trials[0]
        if not first.is_memory:
            raise ConfigError(f"find_micro_batch: {first.reason}")
        raise ConfigError(
            f"find_micro_batch: a micro-batch of {sizes[0]} does not fit: {first.reason}",
            remedy="farandole estimate says what would make it fit",
        )
    good, bad = 0, len(sizes)
    while bad - good > 1:
        # The largest size that is at most double, and then the middle of what remains.
        double = max(i for i, size in enumerate(sizes) if size <= 2 * sizes[good])
        middle = max(good + 1, double) if bad == len(sizes) else (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return trials


def run_in_child(request: TrialRequest, trial_seconds: float) -> TrialResult:
    """Run one trial in a process of its own. Whatever becomes of it is a result; this process is not touched."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            out, _ = process.communicate(request.to_json() + "\n", timeout=trial_seconds)
        except subprocess.TimeoutExpired:
            reason = f"took longer than {format_seconds(trial_seconds)}"
            return TrialResult(request.samples, fits=False, reason=reason, is_memory=False)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the trial has started
        with suppress(ValueError, TypeError):
            return TrialResult(**json.loads(out.splitlines()[-1] if out else ""))
        return TrialResult(request.samples, fits=False, reason=_end_of(process.returncode, errors))


def _end_of(code: int, errors: IO[str]) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"its process was ended by {name}"
    errors.seek(0)
    lines = errors.read().strip().splitlines() or ["no message"]
    return f"its process ended with exit code {code}: {lines[-1]}"
