"""What to predict: sizes, slow ranks, failures, loading; and how a command line says it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.spec import Plan
from .failures import FailureModel

Mode = Literal["weak", "strong"]
MODES: Final[tuple[Mode, ...]] = ("weak", "strong")
MOST_RANKS = 1_048_576
MOST_SIZES = 64


@dataclass(frozen=True)
class ScaleRequest:
    """What to predict."""

    plan: Plan
    ranks: tuple[int, ...]
    """Sizes of the job, ascending."""
    global_batch: int
    """Samples of a step: of the smallest size with weak scaling, of all with strong scaling."""
    modes: tuple[Mode, ...] = MODES
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    """How many times its usual time a rank's computing takes."""
    failures: FailureModel | None = None
    loader_workers: int = 1
    """How many load a rank's batches, each as fast as the cluster's loader."""
    storage_bytes_per_second: float | None = None
    """What all ranks together read; None: no limit."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1 or list(self.ranks) != sorted(set(self.ranks)):
            raise ConfigError(f"sizes {list(self.ranks)}: expected numbers of ranks from 1, ascending")
        if max(self.ranks) > MOST_RANKS or len(self.ranks) > MOST_SIZES:
            raise ConfigError(
                f"{len(self.ranks)} sizes up to {max(self.ranks):,} ranks: expected at most {MOST_SIZES} sizes "
                f"of at most {MOST_RANKS:,}"
            )
        if self.global_batch < 1:
            raise ConfigError(f"global batch {self.global_batch}: expected at least 1 sample")
        if self.loader_workers < 1:
            raise ConfigError(f"loader-workers {self.loader_workers}: expected at least 1")
        if self.storage_bytes_per_second is not None and not 0 < self.storage_bytes_per_second < math.inf:
            raise ConfigError(f"storage-rate {self.storage_bytes_per_second:g}: expected more than 0")
        for rank, factor in self.slow_ranks.items():
            if not 1 <= factor <= 1000:
                raise ConfigError(f"slow rank {rank}:{factor:g}: expected a factor from 1 to 1000")
            if not 0 <= rank < self.ranks[0]:
                raise ConfigError(
                    f"slow rank {rank}: the smallest job has ranks 0 to {self.ranks[0] - 1}",
                    remedy=f"name one of them, or begin with a larger size than {self.ranks[0]} ranks",
                )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read numbers of ranks: ``64``, ``8,16,48``, or ``8..16384``: 8 and its doubles, and the last number.

    Raises `ConfigError` for anything else.
    """
    if ".." in text:
        low, _, high = text.partition("..")
        first, last = _size(low, text), _size(high, text)
        if last < first:
            raise ConfigError(f"--gpus {text}: {first} is more than {last}", remedy=f"write {last}..{first}")
        sizes = [first * 2**i for i in range(math.floor(math.log2(last / first)) + 1)]
        return tuple(sizes if sizes[-1] == last else [*sizes, last])
    return tuple(sorted({_size(each, text) for each in text.split(",")}))


def _size(word: str, text: str) -> int:
    word = word.strip()
    if not (word.isascii() and word.isdigit()) or not 1 <= int(word[:12]) <= MOST_RANKS:
        raise ConfigError(
            f"--gpus {text}: {word!r} is no number of ranks from 1 to {MOST_RANKS:,}",
            remedy="write 64, 8,16,48 or 8..16384",
        )
    return int(word)


def parse_slow_ranks(words: Sequence[str]) -> dict[int, float]:
    """Read ``3:1.5`` and the like: a rank, and by what its computing time is multiplied."""
    found: dict[int, float] = {}
    for text in words:
        number, _, factor = text.partition(":")
        try:
            value = float(factor)
        except ValueError:
            value = math.nan
        if not (number.isascii() and number.isdigit()) or not 1 <= value <= 1000:
            raise ConfigError(
                f"--slow-rank {text}: expected a rank and a factor from 1 to 1000",
                remedy="write --slow-rank 3:1.5",
            )
        if int(number) in found:
            raise ConfigError(f"--slow-rank {text}: rank {number} has a factor already", remedy="give it once")
        found[int(number)] = value
    return found
