"""The command that a job starts, checked before any process exists."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ...core.host import paths
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.suggestions import nearest

_LONG_OPTION_WITH_VALUE = "--check-hash-based-pycs"
_HOROVODS_TESTS = ("common_test.py", "test_common.py", "test_torch.py", "test_tensorflow.py")
"""By which guides check an installation of Horovod."""


def read_command(words: Sequence[str], *, starter: str = "run") -> list[str]:
    """Return the command to start; raise `ConfigError` if it cannot be what was meant.

    `starter`: the command of farandole that starts it, for an example.
    """
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        example = f"farandole {starter} -np 2 -- python train.py"
        raise ConfigError("no command was given", remedy=f"for example: {example}")
    if command[0].endswith(".py"):
        command.insert(0, sys.executable)
    elif command[0] in ("python", "python3") and shutil.which(command[0]) is None:
        command[0] = sys.executable
    if shutil.which(command[0]) is None:
        raise ConfigError(f"command {command[0]!r} was not found", remedy="is it installed, and on the PATH?")
    if Path(command[0]).name.startswith("python"):
        _check_python(command[1:])
    return command


def _check_python(words: Sequence[str]) -> None:
    """Refuse a script that does not exist, cannot be compiled, or has no main, before anything starts."""
    kind, value = _what_python_runs(words)
    if kind == "module":
        if not value:
            raise ConfigError("no module was given after python -m")
        _check_module(value)
    elif kind == "script":
        if not value:
            raise ConfigError("no script was given after python", remedy="for example: python train.py")
        _check_script(Path(value))


def _what_python_runs(words: Sequence[str]) -> tuple[Literal["script", "module", "other"], str]:
    """Return what Python is asked to run, and its name: short options may be written together (``-uc CODE``)."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "-":
            return "other", word
        if not word.startswith("-"):
            return "script", word
        if word.startswith("--"):
            if word == "--version" or word.startswith("--help"):
                return "other", word
            del rest[: word == _LONG_OPTION_WITH_VALUE]
            continue
        for at, letter in enumerate(word[1:], 2):
            if letter in "cVh?":
                return "other", word
            if letter in "mWX":
                value = word[at:] or (rest.pop(0) if rest else "")
                if letter == "m":
                    return "module", value
                break
    return "script", ""


def _check_script(script: Path) -> None:
    """Refuse one that does not exist, or is no Python."""
    if not paths.exists(script):
        near = [path.name for path in script.parent.glob("*.py")] if paths.is_directory(script.parent) else []
        close = nearest(script.name, near)
        remedy = f"did you mean {close!r}?" if close else ""
        if not close and script.name in _HOROVODS_TESTS:
            remedy = "to check that ranks can train together: farandole test"
        raise ConfigError(f"script {script} does not exist", remedy=remedy)
    if paths.is_directory(script):
        if not paths.exists(script / "__main__.py"):
            raise ConfigError(f"{script} is a directory without a __main__.py", remedy="name the script to start")
        return
    if script.suffix == ".py":
        with paths.reading_python(script):
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)


def _check_module(name: str) -> None:
    """Refuse ``-m package`` when the package lies in the working directory and has no main."""
    place = Path(*name.split("."))
    mains = (place / "__main__.py", Path(f"{place}.py"))
    if paths.is_directory(place) and not any(paths.exists(main) for main in mains):
        raise ConfigError(f"package {name} has no __main__.py", remedy="name the module to start")


def script_label(words: Sequence[str]) -> str:
    """Return a short name for a run: the script's, without its ending."""
    for word in words:
        if word.endswith(".py"):
            return Path(word).stem
    rest = [word for word in words if not word.startswith("-") and not word.startswith("python")]
    return Path(rest[0]).name if rest else "run"
