"""The largest micro-batch that fits, by trials in processes of their own: doubling, then bisection."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import IO

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.units import format_seconds
from .trial import MODULE, TrialRequest, TrialResult

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
