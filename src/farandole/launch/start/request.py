"""What a user asks to be started, read and checked, before anything is decided about it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...core.host import paths
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import RUN
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import nearest
from ..elastic.options import ElasticOptions
from ..job.contract import GRACE_SECONDS
from ..job.hosts import HostSlots
from ..output import OWN_STYLE, OutputStyle
from ..ssh.remote_shell import SshOptions
from ..supervise.job_loop import Outcome

# The command that a job starts, checked before any process exists.

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


@dataclass(frozen=True)
class RemoteOptions:
    """What the user says of hosts that are reached by ssh."""

    ssh: SshOptions = field(default_factory=SshOptions)
    python: str | None = None
    directory: str | None = None
    prelude: str = ""
    variables: tuple[str, ...] = ()
    """Variables to pass to the ranks, ``NAME`` or ``NAME=VALUE`` each."""


@dataclass(frozen=True)
class VerifyOptions:
    """What ``farandole verify`` asks of a job; without steps, nothing."""

    steps: int = 0
    deep: bool = False


@dataclass(frozen=True)
class Ending:
    """How a job ends, and when it begins again."""

    grace_seconds: float = GRACE_SECONDS
    """How long ranks have to end after SIGTERM to the launcher."""
    restarts: int = 0
    """How often all ranks are started again after one has failed."""
    least_ranks: int | None = None
    """With how few, where some are lost for good; None: with as many as before."""


@dataclass(frozen=True)
class JobRequest:
    """A job as it was asked for; `placing.place_job` says where its ranks go."""

    command: list[str]
    plan: Plan | None = None
    """None: none was given, and the ranks take that of the script."""
    size: int | None = None
    """How many ranks; None: as many as there are slots, or cores."""
    hosts: Sequence[HostSlots] = ()
    """Empty: this machine, the hosts of the emulation, or what a scheduler has chosen."""
    bind: bool = True
    """Whether ranks are bound to their share of the cores."""
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    elastic: ElasticOptions | None = None
    """None: the number of ranks is fixed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks beside those of their places."""
    style: OutputStyle = OWN_STYLE
    output_to_stderr: bool = False
    """Whether what ranks print to stdout goes to stderr, because stdout is for a result."""
    label: str = "run"
    """Part of the name of a run directory that is not chosen."""
    run_dir: str | None = None
    typed_command: Sequence[str] = ()
    """The command line as the user typed it, which proposals change; empty: not known."""
    verify: VerifyOptions = field(default_factory=VerifyOptions)
    ending: Ending = field(default_factory=Ending)


# What to say of a job that ended well and of which no rank recorded anything: it may not be what was meant.

_OWN_GROUP = (
    "the script used torch.distributed by itself, and nothing was recorded: no model trained in "
    "DistributedDataParallel or fully_shard over all ranks that can be recorded unasked; farandole.record(model, "
    "optimizer, loader), after the model is wrapped or sharded, shows where the time goes"
)


def notes_of_unrecorded(directory: Path, outcome: Outcome, *, was_wanted: bool = True) -> list[str]:
    """Return what ran, in a line, and the keys of the plan that nothing used; nothing where a rank has records.

    `was_wanted`: whether a training was to be recorded unasked.
    """
    if any(directory.glob("events-rank*.jsonl")):
        return []
    try:
        facts = json.loads((directory / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    size, notes = facts.get("size"), []
    if size is not None and size > 1 and (was_wanted or not outcome.has_met):
        notes.append(f"note: {_OWN_GROUP if outcome.has_met else _copies(size, outcome.has_met)}")
    return [*notes, *vain_plan(Plan.from_mapping(facts["plan"], where=RUN))] if facts["plan_given"] else notes


def vain_plan(plan: Plan) -> list[str]:
    """Return which keys of `plan` change nothing, in a line, where nothing is given to `farandole.distribute`."""
    changed = plan.differences(Plan())
    keys = ", ".join(f"{key} = {value!r}" for key, (value, _) in changed.items())
    return [
        f"plan: {keys} has no effect: the script gives no model to farandole.distribute, and what it exchanges "
        "goes as it is"
    ][: len(changed)]


def _copies(size: int, has_met: bool | None) -> str:
    """Return what ran where no group was seen: none was made (False), or this launcher cannot know (None)."""
    group = "no torch.distributed group was made at MASTER_ADDR"
    if has_met is None:
        group = "whether they made a torch.distributed group is not known here"
    return (
        f"{size} independent copies ran, as far as Farandole can see: no rank called farandole.init, and {group}. "
        "To train one model on all ranks, call farandole.init() and farandole.distribute(model, optimizer)"
    )
