"""The root cause of a failed job: the first rank to fail, its exception, and the ranks stopped because of it."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...core.failures import is_out_of_memory, is_peer_lost, is_timeout
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import FAILURE, STACKS, Crash, write_private
from ...core.vocabulary.text import NOTICE, name_ranks, who_failed
from .stacks import where_they_stood
from .stopped_process import FROZEN_KIND

LEFT_KIND = "Left"
"""Kind of the report of a rank that ended with exit code 0 while others needed it."""
_STALLED_KIND = "Stalled"
_HANGS = (FROZEN_KIND, _STALLED_KIND)
_FROZEN_REMEDY = (
    "a signal stopped that process, kill -CONT resumes it; with FARANDOLE_FROZEN_SECONDS=0 the job waits for it"
)
_LEFT_REMEDY = (
    "every rank has to take part until all are done, also where a sharded model is saved: does only this one "
    "reach an exit, or a loop's end? A value of one rank (a loss, a KL divergence) ends the loop of all ranks "
    "where each asks for farandole.mean(value)"
)
_LONGER_WAIT = (
    "the others wait for timeout_seconds: give more (--set timeout_seconds=3600, fd.init(timeout_seconds=3600)), "
    "or let every rank do its part of it (fd.shard(loader, evaluate=True))"
)
_MOST_FRAMES = 12
_BAD_INPUT = ConfigError.exit_code


@dataclass(frozen=True)
class Exit:
    """How one rank ended."""

    rank: int
    code: int
    """Exit code; negative: minus the signal that ended it."""
    when_seconds: float
    stopped_by_us: bool = False
    held: str = ""
    """What it wrote last to stderr, when that was a traceback."""
    is_missed: bool = True
    """Whether the others cannot go on without it (`run_files.is_dispensable`)."""
    host: str = ""
    """Where it was; empty: as the caller of `find_failure` says."""
    is_out_of_memory: bool = False
    """Whether the kernel's out-of-memory killer had acted there since the job began."""

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return self.code != 0 and not self.stopped_by_us

    @property
    def left(self) -> bool:
        """Whether it ended well by itself."""
        return self.code == 0 and not self.stopped_by_us


@dataclass(frozen=True)
class HostFailure:
    """Why a host is given up."""

    cause: str
    remedy: str = ""
    exit_code: int = 1
    """Exit code of a job that ends because of it."""
    when_seconds: float | None = None
    """When it happened; None: just now."""
    is_ours: bool = False
    """Whether it is no fault of the host, but of this launcher."""


@dataclass(frozen=True)
class Failure:
    """The first cause of a stop, and its consequences."""

    rank: int | None
    """None: not a rank failed, but its whole host, or the way to it."""
    host: str
    """Empty: the cause is neither a rank nor a host, but this launcher."""
    cause: str
    """One line: the exception, or how the process ended."""
    exit_code: int
    step: int | None = None
    """Steps it had finished; None when unknown."""
    traceback: str = ""
    also_failed: tuple[int, ...] = ()
    """Ranks that failed by themselves, as a consequence or at the same time."""
    stopped: tuple[int, ...] = ()
    stop_seconds: float = 0.0
    remedy: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """All threads of each rank, taken before it was stopped, when the job hung."""

    def to_text(self, directory: Path) -> str:
        """Return the report: the first cause first."""
        lines = [f"farandole: {who_failed(self.rank, self.host, self.step, self.cause)}"]
        if self.traceback.strip() != self.cause:
            lines += ["  " + line for line in self.traceback.rstrip().splitlines()]
        if self.remedy:
            lines.append(f"  {self.remedy}")
        if self.also_failed:
            lines.append(f"farandole: {name_ranks(self.also_failed)} failed too, because of it or with it")
        if self.stopped:
            lines.append(f"farandole: stopped {name_ranks(self.stopped)} after {self.stop_seconds:.2f} s")
        lines += self._stack_lines(directory)
        lines.append(f"farandole: logs in {directory / 'logs'}; exit code {self.exit_code}")
        return "\n".join(lines)

    def _stack_lines(self, directory: Path) -> list[str]:
        lines: list[str] = []
        if self.traceback and not is_timeout(self.traceback, any_origin=True):
            return lines  # it says why; others stood where they were stopped, or long before
        from ...core.failures import describe, read_positions

        pauses = [each for each in read_positions(directory) if each.kind == "pause"]
        if pauses and self.traceback:  # who waited in vain said so: a rank that was killed waited for none
            lines.append(f"farandole: {describe(pauses, past=True)}, and {_LONGER_WAIT}")
        for ranks, frames in where_they_stood(self.stacks):
            lines.append(f"farandole: {name_ranks(ranks)} stood at")
            lines += [f"  {frame}" for frame in frames[:_MOST_FRAMES]]
        if self.stacks:
            lines.append(f"farandole: the stacks of all threads are in {directory / STACKS}")
        return lines

    def write(self, directory: Path) -> None:
        """Leave the account in the run directory."""
        write_private(directory / FAILURE, json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Suspect:
    """A rank that failed, and what is known of why. The first by `order` is the cause."""

    exit: Exit
    crash: Crash | None

    @property
    def is_consequence(self) -> bool:
        """Whether it only tells of another rank."""
        return self.order[0] > 0

    @property
    def order(self) -> tuple[int, float]:
        """Own exceptions and signals by time; exceptions that only report another rank come last.

        Among these, ranks that waited in vain have seen what is wrong. Those whose connections were closed
        have only seen the others give up, now and then a little before these could say why.
        """
        if self.crash is None:
            return _told_of_another(self.exit.held), self.exit.when_seconds
        rank = 0 if not self.crash.consequence else 1 if self.crash.kind == _STALLED_KIND else 2
        return rank, self.crash.when_seconds


def find_suspects(exits: Sequence[Exit], crashes: Sequence[Crash]) -> list[Suspect]:
    """Return the ranks that failed by themselves, the likeliest cause first."""
    by_rank = {crash.rank: crash for crash in crashes}
    # A rank with a crash report failed by itself, even if another process ended it.
    # One that was frozen and woken up by our signal may still end well: the job was stopped because of it.
    guilty = [
        ended
        for ended in exits
        if ended.failed or (ended.rank in by_rank and (ended.code != 0 or not by_rank[ended.rank].consequence))
    ]
    suspects = [Suspect(ended, by_rank.get(ended.rank)) for ended in guilty]
    if suspects and all(suspect.is_consequence for suspect in suspects):
        suspects += _leaver(exits, suspects)
    return sorted(suspects, key=lambda s: s.order)


def _leaver(exits: Sequence[Exit], suspects: Sequence[Suspect]) -> list[Suspect]:
    """Return the rank that ended well before others failed because it was gone, if their errors say this."""
    missed = any(s.crash is not None or "distributed" in s.exit.held or "gloo" in s.exit.held for s in suspects)
    left = min((ended for ended in exits if ended.left), key=lambda ended: ended.when_seconds, default=None)
    return [Suspect(left, account_of_leaving(left))] if missed and left is not None else []


def account_of_leaving(ended: Exit, *, who_waits: str = "which still needed it") -> Crash:
    """Return the account of a rank that ended well too early."""
    return Crash(
        ended.rank, ended.host, None, LEFT_KIND, f"it ended with exit code 0 before the others, {who_waits}", "",
        consequence=False, exit_code=1, when_seconds=ended.when_seconds,
    )  # fmt: skip


def is_explained(exits: Sequence[Exit], crashes: Sequence[Crash]) -> bool:
    """Return whether a cause is known that does more than tell of another rank."""
    suspects = find_suspects(exits, crashes)
    return bool(suspects) and not suspects[0].is_consequence


def find_failure(exits: Sequence[Exit], crashes: Sequence[Crash], *, host: str, stop_seconds: float) -> Failure:
    """Return the first cause among the ranks that failed. There must be one."""
    suspects = find_suspects(exits, crashes)
    guilty = [suspect.exit for suspect in suspects]
    first = suspects[0]
    crash, ended = first.crash, first.exit
    remedy, host = "", ended.host or host
    if crash is not None:
        cause = crash.message if not crash.traceback else f"{crash.kind}: {crash.message}".rstrip(": ")
        trace, step, host = crash.traceback, crash.step, crash.host or host
        remedy = {FROZEN_KIND: _FROZEN_REMEDY, LEFT_KIND: _LEFT_REMEDY}.get(crash.kind, "")
        remedy = remedy or remedy_of(cause, crash.memory_limit)
    elif ended.code < 0:
        cause, trace, step = f"killed by signal {_signal_name(-ended.code)}", ended.held, None
        if -ended.code == signal.SIGKILL:
            remedy = (
                f"the kernel's out-of-memory killer was at work: start fewer ranks, {LESS_MEMORY}"
                if ended.is_out_of_memory
                else "another process killed it; the kernel's out-of-memory killer did not act"
            )
        elif -ended.code == signal.SIGABRT:
            remedy = remedy_of(ended.held)
    else:
        trace, step = ended.held, None
        cause = _last_words(ended) or f"exit code {ended.code}"
        remedy = remedy_of(cause)
    return Failure(
        rank=ended.rank,
        host=host,
        step=step,
        cause=cause.splitlines()[0] if cause else f"exit code {ended.code}",
        traceback=trace,
        exit_code=_exit_code(ended, crash),
        also_failed=tuple(sorted(s.exit.rank for s in suspects[1:])),
        stopped=tuple(sorted(ended.rank for ended in exits if ended.code != 0 and ended not in guilty)),
        stop_seconds=stop_seconds,
        remedy=remedy,
    )


def _exit_code(ended: Exit, crash: Crash | None) -> int:
    if ended.code > 1:
        return ended.code
    if crash is not None:  # Python itself ends with 1 after any exception
        return crash.exit_code
    return ended.code if ended.code > 0 else 128 - ended.code


def is_hang(exits: Sequence[Exit], crashes: Sequence[Crash]) -> bool:
    """Return whether some rank stands still, as far as can be told: then the stacks of all say more."""
    if any(crash.kind in _HANGS for crash in crashes):
        return True
    return any(is_timeout(ended.held, any_origin=True) for ended in exits)


def out_of_memory_kills() -> int:
    """Return how often the kernel's out-of-memory killer has acted, if the kernel reports it."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    match = re.search(r"^oom_kill (\d+)$", text, re.M)
    return int(match.group(1)) if match else 0


def _told_of_another(text: str) -> int:
    """Return how indirect an error is: 0 the cause itself, 1 a rank did not come, 2 a rank left."""
    if is_timeout(text, any_origin=True):
        return 1
    return 2 if is_peer_lost(text, any_origin=True) else 0


def _last_words(ended: Exit) -> str:
    """Return the last line that says why a rank ended: a notice of ours does not, an error of ours ends with 2."""
    lines = [line.strip() for line in ended.held.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(NOTICE)] or (lines if ended.code == _BAD_INPUT else [])
    return said[-1] if said else ""


def _signal_name(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


# Why a job of many hosts stopped: a rank's failure, or the loss of a host as a whole.
#
# [Note: cause across hosts] A host that is lost makes the ranks of other hosts fail, within milliseconds or
# much later, and the news of its loss comes last. So an exception that only tells of another rank is not
# believed while a host is suspiciously silent; and a loss counts from the moment the host fell silent.


@dataclass(frozen=True)
class Loss:
    """A host that failed as a whole."""

    host: str
    when_seconds: float
    failure: HostFailure
    ranks: tuple[int, ...] = ()
    """Those that were running there."""


def find_cause(
    exits: Sequence[Exit], crashes: Sequence[Crash], losses: Sequence[Loss], stop_seconds: float
) -> Failure | None:
    """Return the first cause; None when nothing failed. See [Note: cause across hosts]."""
    suspects = find_suspects(exits, crashes)
    first = min(losses, key=lambda loss: loss.when_seconds, default=None)
    if first is not None and (not suspects or (0, first.when_seconds) < suspects[0].order):
        return _of_loss(first, exits, crashes, stop_seconds)
    return find_failure(exits, crashes, host=socket.gethostname(), stop_seconds=stop_seconds) if suspects else None


def _of_loss(loss: Loss, exits: Sequence[Exit], crashes: Sequence[Crash], stop_seconds: float) -> Failure:
    also = tuple(suspect.exit.rank for suspect in find_suspects(exits, crashes))
    stopped = {ended.rank for ended in exits if ended.code != 0} - set(also)
    failure, is_ours = loss.failure, loss.failure.is_ours
    running = f" (ranks {', '.join(map(str, loss.ranks))} ran there)" if loss.ranks and not is_ours else ""
    return Failure(
        None, "" if is_ours else loss.host, f"{failure.cause}{running}", failure.exit_code,
        also_failed=tuple(sorted(also)), stopped=tuple(sorted(stopped)), stop_seconds=stop_seconds,
        remedy=failure.remedy,
    )  # fmt: skip


# What to change where a script ends with an error of torch that says what is wrong, but not what to do.

_WITHOUT_GPU = (
    "put if torch.cuda.is_available(): before torch.cuda.set_device(...), and "
    'device = "cuda" if torch.cuda.is_available() else "cpu" instead of .cuda(); leave device_ids out'
)
_USUAL = {
    r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs": (
        'torch sees no GPU for NCCL here: write "gloo" where the script says "nccl", or leave that and start with '
        f"farandole run --backend farandole; where the script names the GPU, {_WITHOUT_GPU}"
    ),
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available|_cuda_setDevice": (
        f"torch sees no GPU here: {_WITHOUT_GPU}"
    ),
    r"device_ids and output_device arguments only work": (
        "DistributedDataParallel takes device_ids and output_device for a GPU: leave them out where there is none"
    ),
    r"terminate called without an active exception": (
        "threads of torch were still at work when the process ended: call "
        "torch.distributed.destroy_process_group() at the script's end"
    ),
    r"EOFError: EOF when reading a line|BdbQuit": (
        "ranks have no terminal, and no stdin to read: input() and breakpoint() work with farandole run -np 1 "
        "in a terminal, which its rank inherits"
    ),
    r"mixed dtype \(CPU\)": (
        "a norm met an input in float32 and parameters in bfloat16: is there a buffer in float32 (plan: "
        "bf16_parameters leaves buffers as they are)? Cast what it is multiplied with, x * self.scale.to(x.dtype)"
    ),
    r"got mixed torch\.Tensor and DTensor": (
        "at zero = 3 a sharded parameter is a DTensor: take a sum over these before the forward pass, add its "
        "full_tensor() to the loss, and sum over other tensors (experts) apart"
    ),
}
"""By the text of an error."""


LESS_MEMORY = (
    "take a smaller batch, or --set recompute=blocks --set zero=3; farandole estimate says before a run what fits"
)
_GPU = re.compile(r"(GPU \d+) has a total capacity of ([\d.]+ \w+)")


def remedy_of(cause: str, memory_limit: str = "") -> str:
    """Return what to change; nothing where that is not known.

    Args:
        cause: an error's line, or all that it wrote.
        memory_limit: the memory that the process might take, as words; empty: not known.
    """
    usual = next((remedy for text, remedy in _USUAL.items() if re.search(text, cause)), "")
    if usual or not is_out_of_memory(cause):
        return usual
    gpu = _GPU.search(cause)
    limit = f"the {gpu[2]} of {gpu[1]}" if gpu else f"the limit of {memory_limit}" if memory_limit else ""
    return f"out of memory{' at ' * bool(limit)}{limit}: {LESS_MEMORY}"
