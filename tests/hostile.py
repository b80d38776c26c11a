"""Bad and hostile input for the command line, made from a seed: noise, and valid input with a few slips in it.

`hostile_texts` is the corpus of texts that a careless program would run, follow or print; `random_host_file` and
`random_line` are what a fuzzer feeds to `farandole run`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

HOSTILE_PIECES = (
    "-oProxyCommand=touch CANARY", "--oProxyCommand=touch CANARY", "-F/dev/null", "$(touch CANARY)",
    "`touch CANARY`", "; touch CANARY;", "| touch CANARY", "|| touch CANARY", "&& touch CANARY",
    "& touch CANARY &", "' ; touch CANARY ; '", '" ; touch CANARY ; "', "\n touch CANARY \n",
    "\r\ntouch CANARY\r\n", "<(touch CANARY)", "> CANARY", ">>CANARY", "\\", "\\'", "*", "~", "~root", "{a,b}",
    "%h", "%n$(touch CANARY)", "!!", "!touch", "$IFS", "${HOME}", "${x:=$(touch CANARY)}",
    "$'\\ntouch CANARY'", "() { :;}; touch CANARY", "{host}", "\0", "\r", "\t", "\v", "\x1b[2J",
    "\x1b]0;owned\x07", "\x9b31m", "\u202e", "\u2028", "\ufeff", "\u00e9", "\uff1b", "\U0001f600", "\udcff",
    "a b", "..", "../../CANARY", "/", "//", "@", ":", "#", "=", "-", "--", "-x", "%0a", "1e999", "\u0661",
)  # fmt: skip
"""``CANARY`` stands for a file that whoever runs or follows the text would make."""
_PLAIN = ("host1", "node-2.example.org", "10.0.0.1", "fe80::1", "a", "4", "train", "")


@cache
def hostile_texts(count: int, *, canary: str = "owned") -> tuple[str, ...]:
    """Return at least `count` different texts, the same ones each time."""
    chance = random.Random(7)
    found = dict.fromkeys(piece.replace("CANARY", canary) for piece in HOSTILE_PIECES)
    while len(found) < count:
        pieces = [chance.choice((*HOSTILE_PIECES, *_PLAIN)) for _ in range(chance.randint(1, 4))]
        found["".join(pieces).replace("CANARY", canary)] = None
    return tuple(found)


# -- host files -----------------------------------------------------------------------------------

_HOST_LINES = (
    "node1 slots=4", "node2 slots = 2   # two cards are broken", "", "# comment", "node3:3", "node5",
    "[fe80::1]:2", "node4 slots=2 max-slots=4 port=2222", "::2 slots=1", "node6 max_slots=1",
    "\tnode7\tslots=8\t", "10.0.0.9:1",
)  # fmt: skip
_ODD_BYTES = (
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\t", b"\x0b", b"\x1b[2J", b"\xe2\x80\xae",
    b"\xe2\x80\xa8", b"-", b"#", b"=", b":", b"[", b"]", b"%", b"\xc2\xa0", b"\xd9\xa1", b"slots=",
    b"slots=-1", b"slots=99999999999999999999", b"slots=0", b"slots=4", b"slots=\xc2\xb2", b"port=0",
    b"max-slots=1", b" ", b"  ", b"\n", b"-oProxyCommand=x",
)  # fmt: skip


def random_host_file(chance: random.Random) -> bytes:
    """Return the bytes of a host file: noise, or good lines with some bytes changed or moved."""
    kind = chance.random()
    if kind < 0.15:
        return chance.randbytes(chance.randint(0, 200))
    if kind < 0.25:
        return b"".join(chance.choice(_ODD_BYTES) for _ in range(chance.randint(0, 30)))
    if kind < 0.26:
        return chance.choice(
            (b" ", b"\t", b"a", b"=", b"slots=", b"#", b"a:", b"\n", b"9", b"a\n")
        ) * chance.choice((1000, 5000, 50_000))
    end = chance.choice(("\n", "\n", "\n", "\r\n"))
    lines = [chance.choice(_HOST_LINES) for _ in range(chance.randint(1, 8))]
    return mutated(end.join(lines).encode(), chance, chance.randint(0, 4))


def mutated(data: bytes, chance: random.Random, times: int) -> bytes:
    """Return `data` with `times` slips in it."""
    for _ in range(times):
        start = chance.randint(0, len(data))
        end = min(len(data), start + chance.randint(0, 5))
        kind = chance.randrange(5)
        if kind == 0:
            data = data[:start] + data[end:]
        elif kind == 1:
            data = data[:start] + chance.choice(_ODD_BYTES) + data[end:]
        elif kind == 2:
            data = data[:start] + data[start:end] * chance.choice((2, 3, 50)) + data[end:]
        elif kind == 3:
            data = data[:start] + chance.randbytes(1) + data[start:]
        else:
            data = data[start:] + data[:start]
    return data


# -- command lines --------------------------------------------------------------------------------

_GOOD_VALUES = (
    "2", "4", "8", "0", "-1", "1", "a:2,b:2", "localhost:2", "node1:4", "[fe80::1]:2,b:1",
    "10.0.0.1:1,10.0.0.2:1", "a:0", "a@b:0", "a:0,1", "accumulate=4", "codec=int8", "A=b", "HOME",
    "ProxyJump=door", "Port=22", "slurm", "mpi", "kubernetes", "ray", "yaml", "sbatch", "shell", "lo", "true",
    "0.5", "64mb", "30s", "nan", "inf", "1e999", "9" * 30, "9" * 5000, "bucket_bytes=" + "9" * 400, "train.py",
    ".", "/", "/dev/null", "source env.sh", "python3", "sh -c {host}", "job",
)  # fmt: skip
_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("python", "train.py"), ("--", "python", "train.py", "--lr", "0.1"), ("train.py",),
    ("--", "sh", "-c", "true"), ("python", "-m", "train"), ("python", "-c", "print()"), ("--", "python"), (),
    ("python", "no.py"), ("python", "-"),
)  # fmt: skip


def random_line(chance: random.Random, parser: argparse.ArgumentParser, files: list[Path]) -> list[str]:
    """Return the words after ``farandole run --dry-run``; options are those of `parser`, some name `files`."""
    texts = hostile_texts(400)
    actions = [
        action
        for action in parser._actions
        if action.option_strings and action.dest not in ("help", "check_build")
    ]
    weighted = [action for action in actions if action.dest in _OFTEN] * 6 + actions

    def value() -> str:
        kind = chance.random()
        if kind < 0.55:
            return chance.choice(_GOOD_VALUES)
        if kind < 0.7:
            return str(chance.choice(files))
        if kind < 0.85:
            return chance.choice(texts)
        good = chance.choice(_GOOD_VALUES).encode()
        return mutated(good, chance, chance.randint(1, 3)).decode(errors="surrogateescape")

    words: list[str] = []
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        action = chance.choice(weighted)
        spelling = chance.choice(action.option_strings)
        count = action.nargs if isinstance(action.nargs, int) else 1
        values = [_fitting(action, chance, value) for _ in range(count)]
        if count == 1 and spelling.startswith("--") and chance.random() < 0.3:
            words.append(f"{spelling}={values[0]}")
        else:
            words += [spelling, *values]
        if chance.random() < 0.03:
            words.append(chance.choice(texts))
    words += chance.choice(_COMMANDS)
    for _ in range(chance.choice((0, 0, 0, 0, 1, 2))):
        where = chance.randint(0, len(words))
        slip = chance.choice(("drop", "double", "insert", "change"))
        if slip == "insert" or not words:
            words.insert(where, chance.choice(texts))
        elif slip == "drop":
            del words[where - 1]
        elif slip == "double":
            words.insert(where, words[where - 1])
        else:
            changed = mutated(words[where - 1].encode(errors="surrogateescape"), chance, 1)
            words[where - 1] = changed.decode(errors="surrogateescape")
    return words


_OFTEN = (
    "size", "hosts", "hostfile", "include", "exclude", "ssh_options", "ssh_command", "python", "chdir",
    "prelude", "variables", "on", "ssh_port", "settings", "plan", "min_ranks",
)  # fmt: skip


def _fitting(action: argparse.Action, chance: random.Random, value: Callable[[], str]) -> str:
    """Return a value that is often one that the option takes, so that what comes after it is tried too."""
    if chance.random() < 0.5:
        return value()
    if action.choices:
        return str(chance.choice(list(action.choices)))
    if action.type in (int, float):
        return str(chance.randint(1, 9))
    return {
        "hosts": "a:4,b:4", "include": "a", "exclude": "b:0", "ssh_options": "Port=22", "python": "python3",
        "chdir": "/tmp", "prelude": "true", "variables": "A=b", "settings": "accumulate=2",
    }.get(action.dest) or value()  # fmt: skip
