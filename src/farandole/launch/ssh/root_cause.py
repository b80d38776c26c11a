"""Why a job on many hosts stopped: a rank's failure, or the loss of a host as a whole.

See [Note: cause across hosts].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.vocabulary.run_files import Crash
from ..supervise.failure import Exit, Failure, find_failure, find_suspects
from .link.host_failure import HostFailure
from .link.host_link import HostLink


@dataclass(frozen=True)
class Loss:
    """A host that failed as a whole."""

    link: HostLink
    when_seconds: float
    failure: HostFailure
    ranks: tuple[int, ...] = ()
    """Those that were running there."""


def find_cause(
    exits: Sequence[Exit], crashes: Sequence[Crash], losses: Sequence[Loss], links: Sequence[HostLink],
    stop_seconds: float,
) -> Failure | None:  # fmt: skip
    """Return the first cause; None when nothing failed."""
    suspects = find_suspects(exits, crashes)
    first = min(losses, key=lambda loss: loss.when_seconds, default=None)
    if first is not None and (not suspects or (0, first.when_seconds) < suspects[0].order):
        return _of_loss(first, exits, crashes, stop_seconds)
    if not suspects:
        return None
    failure = find_failure(
        exits, crashes, host="", stop_seconds=stop_seconds,
        out_of_memory=any(link.out_of_memory for link in links),
    )  # fmt: skip
    host = next(link.name for link in links if failure.rank in {place.rank for place in link.places})
    return replace(failure, host=host)


def _of_loss(loss: Loss, exits: Sequence[Exit], crashes: Sequence[Crash], stop_seconds: float) -> Failure:
    also = tuple(suspect.exit.rank for suspect in find_suspects(exits, crashes))
    stopped = {ended.rank for ended in exits if ended.code != 0} - set(also)
    failure, is_ours = loss.failure, loss.failure.is_ours
    running = f" (ranks {', '.join(map(str, loss.ranks))} ran there)" if loss.ranks and not is_ours else ""
    return Failure(
        None, "" if is_ours else loss.link.name, f"{failure.cause}{running}", failure.exit_code,
        also_failed=tuple(sorted(also)), stopped=tuple(sorted(stopped)), stop_seconds=stop_seconds,
        remedy=failure.remedy,
    )  # fmt: skip
