"""Texts for people: what a remedy suggests, lists of ranks, notices, and words of others made fit to be shown.

How Farandole is installed stands here alone: from its folder, because no package index has it.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[4]
FOLDER = str(_SOURCE) if (_SOURCE / "pyproject.toml").is_file() else "FARANDOLES_FOLDER"
"""Where the running copy was installed from; a word to replace where that is not known."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None when nothing is close."""
    names = list(known)
    found = [each for each in names if _is_swapped(name, each)]
    found += difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return found[0] if found else None


def _is_swapped(name: str, other: str) -> bool:
    """Return whether two neighbouring letters changed places: the commonest slip, to difflib two of them."""
    swaps = (f"{name[:at]}{name[at + 1]}{name[at]}{name[at + 2 :]}" for at in range(len(name) - 1))
    return name != other and other in swaps


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a remedy: the nearest name, or all of them.

    >>> did_you_mean("bucket_byte", ["accumulate", "bucket_bytes"])
    "did you mean 'bucket_bytes'?"
    """
    names = sorted(known)
    close = nearest(name, names)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(names) or 'none'}"


def install_command(extra: str = "") -> str:
    """Return the command that installs this copy, with the packages of `extra`."""
    return f"pip install -e {shlex.quote(f'{FOLDER}[{extra}]' if extra else FOLDER)}"


def upgrade_remedy() -> str:
    """Return what to do where a file is of a newer Farandole."""
    return f"upgrade with: git -C {shlex.quote(FOLDER)} pull"


def elsewhere_remedy(python: str) -> str:
    """Return what to do on another host, whose interpreter is `python`, to have this version there."""
    return f"install the same version there: copy {FOLDER}, then {python} -m pip install -e COPY"


# Tables.


def in_columns(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Return a line of each row: columns are two blanks apart, those in `left` begin alike, the others end alike.

    >>> in_columns([["a", "b"], ["x", "10"]])
    ['a   b', 'x  10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Return the rows below their head, the first column to the left, the others to the right."""
    return "\n".join(indent + line for line in in_columns([head, *rows]))


# Lists of ranks as messages, findings and reports write them.


def name_ranks(ranks: Sequence[int], *, most: int | None = None, hosts: Sequence[str] = ()) -> str:
    """Return ranks as a sentence has them, `most` of them by number, and the hosts they are on.

    >>> name_ranks([3]), name_ranks([0, 2, 5]), name_ranks([0, 1, 2, 3, 4])
    ('rank 3', 'ranks 0, 2 and 5', 'ranks 0-4')
    >>> name_ranks([0, 2, 4, 6, 8, 10], most=4, hosts=["b"])
    'ranks 0, 2, 4, 6 and 2 more (host b)'
    """
    where = f" (host {', '.join(hosts)})" if hosts else ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}{where}"
    if len(ranks) > (most or 3) and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}{where}"
    if most is not None and len(ranks) > most:
        shown, last = ranks[:most], f"{len(ranks) - most} more"
    else:
        shown, last = ranks[:-1], str(ranks[-1])
    return f"ranks {', '.join(map(str, shown))} and {last}{where}"


def write_numbers(numbers: Iterable[int]) -> str:
    """Write a set of numbers as ranges, as Linux writes cores.

    >>> write_numbers({0, 1, 2, 8, 10})
    '0-2,8,10'
    """
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def parse_numbers(text: str, *, most: int = 4096) -> set[int]:
    """Read what `write_numbers` wrote; nothing of another text, nor of more than `most` numbers.

    >>> sorted(parse_numbers("0-2,8,10"))
    [0, 1, 2, 8, 10]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return set()
        span = range(int(first), int(last or first) + 1)
        if len(found) + len(span) > most:
            return set()
        found.update(span)
    return found


def who_failed(rank: int | None, host: str, step: int | None, cause: str) -> str:
    """Return one line about the first cause of a stop, for example ``rank 1 on a failed after step 5: killed``.

    Args:
        rank: None: a whole host failed, or the way to it.
        host: Empty: neither a rank nor a host, but the launcher says `cause`.
        step: Steps that the rank had finished; None when unknown.
        cause: The exception, or how the process ended.
    """
    if not host:
        return cause
    after = f" after step {step}" if step else " before its first step" if step == 0 else ""
    return f"{f'host {host}' if rank is None else f'rank {rank} on {host}'} failed{after}: {cause}"


# Lines of Farandole's own on the standard error: one prefix, so that users tell them from their script's.


NOTICE = "farandole: "


def write_notice(text: str) -> None:
    """Write ``farandole: text`` and a newline to the standard error, at once."""
    sys.stderr.write(f"{NOTICE}{text}\n")
    sys.stderr.flush()


# What other people wrote, made fit to be shown: no character that moves a cursor, and no more than one reads.


MOST_LINE_CHARACTERS = 1500
MOST_VALUE_CHARACTERS = 100


def plain(text: str) -> str:
    r"""Return `text` for a terminal: odd characters escaped, lines without end cut in the middle.

    >>> plain("no host \x1b[2Ja")
    'no host \\x1b[2Ja'
    """
    return "\n".join(shortened(_escaped(line), MOST_LINE_CHARACTERS) for line in text.split("\n"))


def quoted(value: str) -> str:
    """Return a value that was written wrong, in quotation marks, as an error shows it; a long one in part."""
    return repr(shortened(value, MOST_VALUE_CHARACTERS))


def shortened(text: str, most_characters: int) -> str:
    """Return `text`, or its beginning, how long it was, and its end."""
    if len(text) <= most_characters:
        return text
    middle = f"...({len(text)} characters)..."
    end = (most_characters - len(middle)) // 3
    return text[: most_characters - len(middle) - end] + middle + text[-end:]


def _escaped(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
