"""Which runs the scaling benchmark makes: the user's command at each size, weak and strong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.vocabulary.errors import ConfigError

WEAK, STRONG = "weak", "strong"
MODES = (WEAK, STRONG, "both")
BATCH, NP = "{batch}", "{np}"
MOST_RANKS = 4096


@dataclass(frozen=True)
class ScalingCase:
    """One command at one size."""

    mode: str
    ranks: int
    command: tuple[str, ...]
    changes: tuple[str, ...] = ()
    """What the plan has besides: ``KEY=VALUE``, each."""


@dataclass(frozen=True)
class ScalingPlans:
    """What the runs have in their plan."""

    words: tuple[str, ...] = ()
    """Options of ``farandole run`` that set the plan of all runs."""
    changes: tuple[str, ...] = ()
    """``KEY=VALUE``, each: set besides in a second run of each size."""


def read_sizes(text: str) -> list[int]:
    """Read ``1,2,4``: numbers of ranks, each once, in order. Raises `ConfigError`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 1 <= int(word) <= MOST_RANKS for word in words):
        raise ConfigError(
            f"--np {text!r}: expected numbers of ranks, 1 to {MOST_RANKS}", remedy="for example: 1,2,4"
        )
    sizes = sorted(int(word) for word in words)
    if len(set(sizes)) != len(sizes):
        raise ConfigError(f"--np {text!r}: a number is given twice")
    if len(sizes) < 2:
        raise ConfigError(f"--np {text!r}: one size shows no scaling", remedy="for example: 1,2,4")
    return sizes


def read_changes(text: str | None) -> tuple[str, ...]:
    """Read ``codec=auto lossy=true``: what one of the two plans has besides. Raises `ConfigError`."""
    words = () if text is None else tuple(text.split())
    if text is not None and not (words and all("=" in word for word in words)):
        raise ConfigError(f"--compare {text!r}: expected KEY=VALUE", remedy="for example: --compare codec=int8")
    return words


def make_cases(
    command: Sequence[str], sizes: Sequence[int], mode: str, batch: int | None, changes: tuple[str, ...] = ()
) -> list[ScalingCase]:
    """Return the runs of one round, by mode and size.

    With `changes`, each size of more than one rank runs a second time with these in the plan too.

    In the command, ``{np}`` stands for the ranks and ``{batch}`` for the batch of a rank: `batch` in weak scaling,
    where every rank keeps its work, and `batch` / ranks in strong scaling, where all share it.

    Raises `ConfigError` for a batch without a place or a place without a batch.
    """
    placed = any(BATCH in word for word in command)
    if placed and batch is None:
        raise ConfigError(f"the command has {BATCH}, but no --batch", remedy="for example: --batch 64")
    if batch is not None and not placed:
        raise ConfigError(
            f"--batch {batch}: the command has no {BATCH} where it would go",
            remedy=f"for example: -- python train.py --batch-size {BATCH}",
        )
    if mode != WEAK and not placed:
        raise ConfigError(
            "strong scaling divides the batch among the ranks, and the command does not say where its batch is",
            remedy=f"for example: --mode strong --batch 64 -- python train.py --batch-size {BATCH}",
        )
    modes = (WEAK, STRONG) if mode == "both" else (mode,)
    return [
        ScalingCase(one, ranks, tuple(_filled(word, ranks, _of_rank(one, ranks, batch)) for word in command), also)
        for one in modes
        for ranks in sizes
        for also in ([(), changes] if changes and ranks > 1 else [()])
    ]


def _of_rank(mode: str, ranks: int, batch: int | None) -> int | None:
    if batch is None or mode == WEAK:
        return batch
    if batch % ranks:
        raise ConfigError(f"--batch {batch} cannot be divided among {ranks} ranks", remedy="choose a multiple")
    return batch // ranks


def _filled(word: str, ranks: int, batch: int | None) -> str:
    return word.replace(NP, str(ranks)).replace(BATCH, str(batch))
