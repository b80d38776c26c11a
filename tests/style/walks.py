"""Follows a plan from the command line to a rank: which files of the source see it on its way.

A process is started by a probe, which watches the calls of every function of `src/farandole`. A file is entered
when one of its functions is called. It is on the walk of a text such as ``codec=int8`` when the arguments or the
result of such a call carry it: as text, as bytes, in a plan, or inside another object that is at most `DEPTH`
attributes or items away. The options of a line as a whole (a Namespace) do not count, nor does what is read
after the job by `observe`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "farandole"
DEPTH = 4
SCRIPT = """\
from farandole.core.job_plan import resolve_plan
print("the plan says", resolve_plan(None).codec)
"""


class Walk(NamedTuple):
    """Files of the source, as paths below it without their ending."""

    entered: set[str]
    carrying: set[str]


def walk_over_ssh(directory: Path, key: str = "codec", value: str = "int8") -> Walk:
    """Run a script on two hosts that a fake ssh makes of this machine; return the walk of one key of its plan."""
    seen, probe, shell = directory / "seen", directory / "probe", directory / "shell"
    seen.mkdir()
    code = f"import sys; sys.path.insert(0, '{Path(__file__).parents[2]}'); from tests.style import walks"
    call = f'exec {sys.executable} -c "{code}; walks.probe()" {seen} {key} {value} "$@"'
    probe.write_text(f"#!/bin/sh\n{call}\n")
    shell.write_text('#!/bin/sh\nexec /bin/sh -c "$2"\n')
    for file in (probe, shell):
        file.chmod(0o755)
    (directory / "script.py").write_text(SCRIPT)
    words = ["run", "-H", "a:1,b:1", "--ssh-command", f"{shell} {{host}}", "--python", str(probe)]
    words += ["--set", f"{key}={value}", "--quiet", "--", sys.executable, "script.py"]
    done = subprocess.run(
        [str(probe), "-m", "farandole", *words], cwd=directory, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"the plan says {value}") == 2, done.stdout
    lines = [json.loads(line) for file in seen.iterdir() for line in file.read_text().splitlines()]
    found = [(name, does) for name, does in lines if not name.startswith("observe/")]
    return Walk({name for name, _ in found}, {name for name, does in found if does})


def probe() -> None:
    """Be a Python whose calls are watched: the words after ours are those of its command line."""
    seen, key, value, *words = sys.argv[1:]
    watch(Path(seen) / str(os.getpid()), key, value)
    while words[0] in ("-I", "-S", "-u"):
        words.pop(0)
    if words[0] == "-c":
        sys.argv = words
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        import runpy

        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")


def watch(out: Path, key: str, value: str) -> None:
    """Write to `out` which files are entered from now on, and whether what passes them carries the text."""
    root = f"{SOURCE}{os.sep}"
    known: dict[str, bool] = {}
    file = out.open("a", buffering=1)

    def look(frame: Any, event: str, result: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(root):
            return
        name = frame.f_code.co_filename[len(root) :].removesuffix(".py")
        if known.get(name) or frame.f_code.co_name == "<module>":
            return
        sys.setprofile(None)
        values = [result] if event == "return" else list(frame.f_locals.values())
        found = any(carries(each, key, value) for each in values)
        if found or name not in known:
            known[name] = found
            file.write(json.dumps([name, found]) + "\n")
        sys.setprofile(look)

    sys.setprofile(look)


def carries(thing: Any, key: str, value: str, depth: int = DEPTH) -> bool:
    """Return whether `thing` holds ``key`` with ``value``."""
    if isinstance(thing, bytes | memoryview):
        return key.encode() in bytes(thing) and value.encode() in bytes(thing)
    if isinstance(thing, str):
        return key in thing and value in thing
    if not depth or thing is None or isinstance(thing, type | int | float | argparse.Namespace):
        return False
    if isinstance(thing, dict):
        return thing.get(key) == value or any(carries(each, key, value, depth - 1) for each in thing.values())
    if isinstance(thing, list | tuple):
        return any(carries(each, key, value, depth - 1) for each in thing)
    if not hasattr(thing, "__dict__") or callable(thing):
        return False
    return carries(dict(vars(thing)), key, value, depth)
