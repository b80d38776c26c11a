"""What a user asks to be started, read and checked, before anything is decided about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.vocabulary.spec import Plan
from ..elastic.options import ElasticOptions
from ..job.contract import GRACE_SECONDS
from ..job.host_list import HostSlots
from ..output.style import OWN_STYLE, OutputStyle
from ..ssh.link.remote_shell import SshOptions


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
    grace_seconds: float = GRACE_SECONDS
    """How long ranks have to end after SIGTERM to the launcher."""
