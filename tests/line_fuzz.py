"""Feeds bad input to `farandole run` in this process, up to where something would be started.

Every input has to end within a few seconds in exit code 0 or 2; 2 with one short account that names what is
wrong, never with a traceback, and without a character that would change how a terminal shows it.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import signal
import tempfile
import traceback
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import FrameType
from unittest.mock import patch

from farandole.cli import main
from farandole.cli.commands import run
from farandole.core.vocabulary.errors import ConfigError
from farandole.launch.job.hosts import HostSlots, read_hostfile

from .hostile import random_host_file, random_line

MOST_SECONDS = 5.0
"""Of the processor, for one input: a machine that has other work too makes no difference."""
MOST_WAIT_SECONDS = 50.0
MOST_SAID_CHARACTERS = 2000


class Fault(AssertionError):
    """An input that was not dealt with as it should."""


def try_host_files(count: int, seed: int) -> Counter[str]:
    """Read random host files; return how often each end came."""
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "hosts"
        for _ in range(count):
            data = random_host_file(chance)
            path.write_bytes(data)
            ends[_try_host_file(path, data)] += 1
    return ends


def _try_host_file(path: Path, data: bytes) -> str:
    try:
        with _bounded():
            hosts = read_hostfile(path)
    except ConfigError as problem:
        _check_account(str(problem), data)
        said = str(problem)
        if not said.startswith(("cannot read host file", f"{path} names no host", f"{path}: slots of")):
            line = re.match(re.escape(str(path)) + r", line (\d+):", said)
            if line is None or not 1 <= int(line[1]) <= data.count(b"\n") + data.count(b"\r") + 1:
                raise Fault(f"no line number in {said!r} of {data[:300]!r}") from None
            if not problem.remedy and "expected" not in said:
                raise Fault(f"no expectation or remedy in {said!r}") from None
        return "refused"
    except BaseException as problem:
        raise Fault(f"{problem!r} on {data[:300]!r}\n{traceback.format_exc()}") from None
    for host in hosts:
        _check_host(host, data)
    return "read"


def _check_host(host: HostSlots, data: bytes) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*", host.name) or not 1 <= host.slots <= 4096:
        raise Fault(f"{host} of {data[:300]!r}")


def try_lines(count: int, seed: int) -> Counter[str]:
    """Give random lines to `farandole run --dry-run`; return how often each exit code came."""
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    parser = run.make_parser()
    with tempfile.TemporaryDirectory() as name, _working_in(name), one_parser(parser):
        files = _files(Path(name), chance)
        for number in range(count):
            if number % 50 == 0:
                files[0].write_bytes(random_host_file(chance))
            ends[f"exit code {try_line(random_line(chance, parser, files))}"] += 1
        made = {path.name for path in Path(name).iterdir()} - {path.name for path in files} - {"train.py"}
    if made:
        raise Fault(f"a dry run made {made}")
    return ends


def try_line(words: list[str]) -> int:
    """Return the exit code of ``farandole run --dry-run``; raise `Fault` when it is not a good end."""
    out, err = _stream("surrogateescape"), _stream("backslashreplace")  # as in `farandole.__main__`
    try:
        with redirect_stdout(out), redirect_stderr(err), _bounded():
            code = main.run(["run", "--dry-run", *words])
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException as problem:
        raise Fault(f"{problem!r} on {words!r}\n{traceback.format_exc()}") from None
    for stream in (out, err):
        stream.flush()
    said = err.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if code not in (0, 2):
        raise Fault(f"exit code {code} on {words!r}: {said}")
    if code == 2:
        if not said:
            raise Fault(f"nothing was said on {words!r}")
        _check_account(said.removesuffix("\n"), words)
    return code


def _check_account(said: str, of: object) -> None:
    odd = [each for each in said if each != "\n" and unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    if odd:
        raise Fault(f"{odd!r} for a terminal in {said!r} of {str(of)[:300]}")
    if "Traceback" in said or len(said) > MOST_SAID_CHARACTERS:
        raise Fault(f"{len(said)} characters for a person to read: {said[:300]!r} of {str(of)[:300]}")


def _files(directory: Path, chance: random.Random) -> list[Path]:
    """Return files to name on a line: a host file, plans and configurations, good and bad, and what is no file."""
    (directory / "train.py").write_text("print()\n")
    contents = {
        "hosts": random_host_file(chance), "plan.toml": b"accumulate = 4\n", "bad.toml": b"accumulate = [[\n",
        "deep.json": b"[" * 100_000, "plan.json": b'{"accumulate": 2}', "list.json": b"[1]", "odd.toml": b"\xff\0",
        "config.yaml": b"params:\n  fusion_threshold_mb: 32\n", "bad.yaml": b"a: [\n",
        "tags.yaml": b"!!python/x 1\n",
        "bad.py": b"def (\n", "nul.py": b"a\0b", "deep.py": b"(" * 5000, "deeper.py": b"-" * 100_000 + b"1",
        "bomb.yaml": yaml_bomb(),
    }  # fmt: skip
    found = []
    for name, data in contents.items():
        (directory / name).write_bytes(data)
        found.append(directory / name)
    return [*found, directory / "missing", directory, Path("/dev/null"), Path("a" * 5000)]


def yaml_bomb() -> bytes:
    """Return a short configuration file one value of which is endless when it is written out."""
    names = "abcdefghijklmnopqrstuvwxyz"
    lists = ["&a [x, x, x]"] + [f"&{name} [*{before}, *{before}, *{before}]" for before, name in pairwise(names)]
    return f"params:\n  fusion_threshold_mb: [{', '.join(lists)}]\n".encode()


def _stream(errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors)


@contextmanager
def one_parser(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Let all lines be read by one parser: making it takes most of the time of a line."""
    with patch.object(run, "make_parser", lambda: parser):
        yield


@contextmanager
def _working_in(directory: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise where the input is when it takes too long: a hang shows where it hangs."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Fault(f"not done after {MOST_SECONDS:g} s of the processor, or {MOST_WAIT_SECONDS:g} s by the clock")

    clocks = (
        (signal.SIGPROF, signal.ITIMER_PROF, MOST_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, MOST_WAIT_SECONDS),
    )
    before = [signal.signal(number, late) for number, _, _ in clocks]
    for _, timer, seconds in clocks:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
