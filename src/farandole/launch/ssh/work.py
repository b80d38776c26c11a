"""What every host of a job over ssh is asked to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..contract import Job
from .remote_shell import HostSetup


@dataclass(frozen=True)
class RemoteWork:
    """A command, and what it gets."""

    command: Sequence[str]
    job: Job
    """Its address and port are found while the job starts."""
    setup: HostSetup
    environment: Mapping[str, str]
    """What every rank gets beside its host's own environment."""
    bind: bool = True
