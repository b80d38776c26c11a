"""What a plain loop calls beside `fd.distribute`: `accumulate`, `mean`, `phase`, `print`, `log`, `seed`, ..."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import IO, Any

import torch

from ..comm.engine.redo import ask_all, sum_up
from ..comm.world.comm_errors import refuse_if_ended, translate_error
from ..comm.world.store_sync import all_gather_json, require_same
from ..comm.world.world import World, has_world, world
from ..core.rank_variables import read_rank_variables
from ..core.vocabulary.errors import ConfigError, PeerLost, Stalled
from ..core.vocabulary.events import Logged, Phase
from ..parallel.model import DistributedModel
from .stall_watcher import open_phases
from .trackers import Trackers


@contextmanager
def accumulate(hold: bool = True) -> Iterator[None]:
    """In this context gradients of backward passes stay on this rank; the first pass outside exchanges them too.

    As ``no_sync`` of DistributedDataParallel: one exchange for several micro-batches instead of one for each. It
    applies to all distributed models. Without a pass outside, the optimizer's step exchanges them. Until then
    ``parameter.grad`` holds this rank's own gradients, so clip and read gradients after a pass outside. The loop
    divides the loss, as in one process. All ranks hold the same passes.

    Args:
        hold: if False, the context does nothing: ``with fd.accumulate((i + 1) % 4 != 0):``.

    Raises:
        ConfigError: `hold` is no bool, the context is inside another one, or the plan's ``accumulate`` is above 1.
        An optimizer's step inside raises it, too.
        Mismatch: at the exchange, on every rank, when the ranks have accumulated different numbers of passes.
    """
    session = world().session
    if not isinstance(hold, bool):
        raise ConfigError(
            f"accumulate: hold is a {type(hold).__name__}, expected True or False",
            remedy="with fd.accumulate((i + 1) % 4 != 0): loss.backward()",
        )
    if session.holds_passes:
        raise ConfigError("accumulate: the context is inside another fd.accumulate", remedy="enter it once a pass")
    for model in DistributedModel.all_of(world()):
        plan = DistributedModel.of(model).plan
        if plan is not None and plan.accumulate != 1:
            raise ConfigError(
                f"accumulate: the plan says accumulate = {plan.accumulate}, and the loop holds passes itself",
                remedy="use one of the two",
            )
    session.hold_passes(hold)
    try:
        yield
    finally:
        session.hold_passes(False)


# `fd.mean`: one number from all ranks, for what a loop reports.


def mean(value: float | torch.Tensor, samples: float = 1) -> float:
    """Return the mean of `value` over the ranks, weighted by `samples`. Call it on all ranks.

    Args:
        value: this rank's number, or a tensor with one element.
        samples: this rank's weight. A rank without samples passes 0; its value is ignored.

    Returns:
        The same float on all ranks; NaN if all weights are 0.
    """
    here = world()
    number = float(value.detach() if isinstance(value, torch.Tensor) else value)
    weighted = number * samples if samples else 0.0

    def question() -> list[float]:
        both = torch.tensor([weighted, float(samples)], dtype=torch.float64, device=here.device)
        if here.size > 1:
            sum_up(here, both, "mean")
        return both.tolist()

    total, count = ask_all(here, question) if here.size > 1 else question()
    return float(total / count) if count else float("nan")


# `fd.phase`: what the loop does beside training, by a name of the user's.


LONGEST_NAME = 80


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record the time spent in this context under `name`.

    Phases nest, and time counts for the innermost one. The report shows it separately from the training.

    Args:
        name: ``"evaluation"``, ``"checkpoint"`` or any other, 1 to 80 characters.

    Raises:
        ConfigError: the name is empty or too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise ConfigError(f"phase: the name is {name!r}, expected a text of 1 to {LONGEST_NAME} characters")
    here = world()
    recorder, names = here.session.recorder, open_phases(here)
    begin = time.monotonic()
    names.append(name)
    try:
        yield
    finally:
        names.remove(name)
        recorder.record(Phase(name, begin, time.monotonic()))


# `fd.print`: lines of rank 0 alone, or of every rank with its number.


def print(  # noqa: A001 - the field's name; fd.print replaces print
    *values: Any,
    sep: str | None = " ",
    end: str | None = "\n",
    file: IO[str] | None = None,
    flush: bool = True,
    all_ranks: bool = False,
) -> None:
    """Print on rank 0 only, or on all ranks with the rank in front of each line. Sends nothing: call it anywhere.

    Before `init` and after `shutdown` the launcher's
    variables say which rank this is.

    Args:
        values: what to print, as for the built-in ``print``; `sep`, `end` and `file` as there.
        flush: write at once.
        all_ranks: print on every rank, as ``rank 1: text``.
    """
    rank = _rank()
    if rank and not all_ranks:
        return
    text = io.StringIO()
    text.write((" " if sep is None else sep).join(map(str, values)))
    text.write("\n" if end is None else end)
    said = text.getvalue()
    if all_ranks:
        said = "".join(f"rank {rank}: {line}" for line in said.splitlines(keepends=True))
    stream = sys.stdout if file is None else file
    if stream is None:  # a process without standard output
        return
    stream.write(said)  # in one piece, so that lines of ranks do not mix
    if flush:
        stream.flush()


def _rank() -> int:
    if has_world():
        return world().rank
    variables = read_rank_variables()
    return 0 if variables is None else variables.rank


# `fd.log`: what only the training loop knows, for the progress line, the metrics and the report.


def log(
    *,
    loss: float | torch.Tensor | None = None,
    tokens: int | None = None,
    samples: int | None = None,
    total_steps: int | None = None,
    metrics: Mapping[str, float | torch.Tensor] | None = None,
) -> None:
    """Report values of the current step for the progress line, the metrics and the report.

    Call it before ``optimizer.step()``. All arguments are optional. `metrics` of rank 0 go to the run directory,
    for the report and ``farandole top``; they and its `loss` also go to the trackers of ``init(log_with=...)``.

    Args:
        loss: mean loss over this rank's samples, a number or a tensor with one element.
        tokens: number of tokens in this rank's batch.
        samples: number of samples in this rank's batch, for loops without a loader of `shard`, which knows them.
            If both say something this holds; of several calls in a step they add up.
        total_steps: number of steps of the whole run.
        metrics: other values by name, numbers or tensors with one element; `mean` is for means over the ranks.

    Raises:
        ConfigError: `loss` or a metric is no number or has several elements, or `samples` is no count.
    """
    here = world()
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise ConfigError(f"log: loss has shape {tuple(loss.shape)}, expected one number")
        loss = float(loss.detach())
    if samples is not None and (type(samples) is not int or samples < 0):
        raise ConfigError(f"log: samples = {samples!r}, expected a whole number from 0")
    values = {} if metrics is None else {name: _number(name, value) for name, value in metrics.items()}
    here.session.recorder.record(Logged(loss, tokens, total_steps, values or None, batch_samples=samples))
    trackers = here.session.keep(Trackers, Trackers)
    if values and here.rank == 0:
        trackers.say_if_lost()
    if loss is not None:
        values = {"loss": float(loss), **values}
    if values:
        trackers.log(values, here.session.steps.done + 1)


def _number(name: str, value: float | torch.Tensor) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, torch.Tensor):
        raise ConfigError(f"log: metric {name!r} has shape {tuple(value.shape)}, expected one number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"log: metric {name!r} is {value!r}, expected a number") from None


# `fd.barrier` and `fd.main_first`: ranks that wait for each other outside the training step.
#
# [Note: bounded waits] Ranks meet at the store, by the name of the call, and not in a collective of the backend:
# so a rank that is missing is named, a rank that makes another call is not mixed up with this one, and the time-
# out can be chosen for each call.


_BARRIER, _MAIN_FIRST = "fd.barrier", "fd.main_first"
_HEARD_SECONDS = 5.0
"""How long a rank whose body failed stays for the others to read why: the store may live in its process."""


def barrier() -> None:
    """Wait until all ranks have called this. Call it on all ranks.

    It waits for the processes, not for work that is queued on an accelerator.

    Raises:
        Stalled: a rank did not come within the time-out of `init`; the message names the rank.
    """
    all_gather_json(world(), _BARRIER, None)


@contextmanager
def main_first(*, local: bool = False, timeout_seconds: float | None = None) -> Iterator[None]:
    """Let rank 0 run the body first and the other ranks after it: a download, or the building of a cache.

    Enter it on all ranks. Ranks do not wait for each other at the end. A body that raises on the first rank is not
    run by the others.

    Args:
        local: on every host, local rank 0 goes first: for a cache on the host's own disk.
        timeout_seconds: how long the others wait for the first; by default the time-out of `init`.

    Raises:
        ConfigError: `timeout_seconds` is not above 0.
        PeerLost: on the waiting ranks, when the body failed on the first one; names its exception.
        Stalled: a rank did not enter, or the first rank did not finish in time.
        Mismatch: the ranks disagree on `local`; raised on every rank.
    """
    here = world()
    seconds = here.timeout_seconds if timeout_seconds is None else timeout_seconds
    if not seconds > 0:
        raise ConfigError(f"main_first: timeout_seconds is {timeout_seconds}, expected a number above 0")
    if here.size == 1:
        yield
        return
    require_same(here, _MAIN_FIRST, [("local", bool(local))])
    key = f"{here.topic(_MAIN_FIRST)}/{here.node_rank if local else 0}"
    if (here.local_rank if local else here.rank) != 0:
        _wait_for_first(here, key, seconds, local=local)
        yield
        return
    failure = "it ended without a result"
    try:
        yield
        failure = ""
    except BaseException as problem:
        failure = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
        raise
    finally:
        _tell(here, key, failure, local=local)


def _tell(here: World, key: str, failure: str, *, local: bool) -> None:
    """Let the others go on, or fail."""
    if not failure:
        refuse_if_ended(here, _MAIN_FIRST)
    assert here.store is not None, "a world of several ranks has a store"
    answer = json.dumps([here.rank, failure])
    try:
        here.store.set(key, answer)
        if failure:
            _stay_until_heard(here, key, local=local)
    except RuntimeError as problem:
        if not failure:  # else the body's own exception is the one to see
            raise translate_error(problem, here, _MAIN_FIRST) from None


def _stay_until_heard(here: World, key: str, *, local: bool) -> None:
    waiting = here.local_size - 1 if local else here.size - 1
    end = time.monotonic() + _HEARD_SECONDS
    assert here.store is not None, "a world of several ranks has a store"
    with suppress(RuntimeError):
        while here.store.add(f"{key}/heard", 0) < waiting and time.monotonic() < end:
            time.sleep(0.02)


def _wait_for_first(here: World, key: str, seconds: float, *, local: bool) -> None:
    refuse_if_ended(here, _MAIN_FIRST)
    assert here.store is not None, "a world of several ranks has a store"
    try:
        here.store.wait([key], timedelta(seconds=seconds))
        rank, failure = json.loads(here.store.get(key))
        if failure:
            here.store.add(f"{key}/heard", 1)
    except RuntimeError as problem:
        is_late = False
        with suppress(RuntimeError):  # a store that is gone is the failure
            is_late = not here.sockets.shut_down and not here.store.check([key])
        if not is_late:
            raise translate_error(problem, here, _MAIN_FIRST) from None
        first = f"local rank 0 of {here.host}" if local else "rank 0"
        raise Stalled(
            f"{first} did not finish its turn within {seconds:g} s",
            rank=here.rank,
            operation=_MAIN_FIRST,
            remedy="give main_first a longer timeout_seconds",
        ) from None
    if failure:
        raise PeerLost(
            f"rank {rank}, which went first, failed in it: {failure}",
            rank=here.rank,
            operation=_MAIN_FIRST,
            remedy=f"look at the error of rank {rank}",
        )


# `fd.seed`: one call for all generators of random numbers of a training.


_LIMIT = 2**63
_NUMPY_LIMIT = 2**32


def seed(number: int, *, per_rank: bool = False) -> int:
    """Seed Python's ``random``, NumPy if it is installed, and torch on all devices. Call it on all ranks.

    Workers of a DataLoader are seeded by torch from its own generator, so they follow. Neither `distribute` nor
    `shard` depends on equal seeds: parameters come from rank 0, and the order of the data follows rank 0's seed.

    Args:
        number: the seed, from 0 to 2**63 - 1, the same on all ranks.
        per_rank: give every rank random numbers of its own, for dropout and augmentation; ranks that see the
            same samples (`tensor`, `pipeline`, `context`) have the same. Rank 0 has those of one process. A split
            of the data that is drawn afterwards, without a generator of its own, is another one on each rank.

    Returns:
        The seed of this rank.

    Raises:
        ConfigError: `number` is no integer or out of range.
        Mismatch: the ranks gave different arguments; raised on every rank.
    """
    here = world()
    is_right = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _LIMIT
    # Before the refusal, so that a wrong number on one rank is an error on all.
    require_same(here, "fd.seed", [("seed", number if is_right else repr(number)), ("per_rank", bool(per_rank))])
    if not is_right:
        raise ConfigError(f"seed: expected an integer from 0 to 2**63 - 1, got {number!r}")
    own = rank_seed(number, here.sample_rank) if per_rank else number
    random.seed(own)
    torch.manual_seed(own)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(own % _NUMPY_LIMIT)
    return own


def rank_seed(number: int, rank: int) -> int:
    """Return a seed that is far from those of other ranks and of neighbouring numbers."""
    if rank == 0:
        return number
    digest = hashlib.sha256(f"{number}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _LIMIT
