"""What every host of a job over ssh is asked to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..job.contract import JobSpec
from .link.remote_shell import HostSetup


@dataclass(frozen=True)
class RemoteJobSpec:
    """A command, and what it gets."""

    command: Sequence[str]
    job: JobSpec
    """Its address and port are found while the job starts."""
    plan: str | None
    """The plan's text for hosts that do not share our directory; None: none was given."""
    setup: HostSetup
    environment: Mapping[str, str]
    """What every rank gets beside its host's own environment."""
    bind: bool = True
