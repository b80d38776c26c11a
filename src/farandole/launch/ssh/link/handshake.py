"""The handshake with a host: the first message, its answer, and whether the host may take part."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ....core.vocabulary.errors import ConfigError
from ....core.vocabulary.suggestions import elsewhere_remedy
from ....core.wire.framing import FrameError
from .frames import Message
from .host_failure import HostFailure
from .protocol import TOKEN_FILE, differences, own_versions
from .remote_shell import HostSetup


class Handshake:
    """The first words to every host of a job, and the file by which a host sees that it shares our directory."""

    def __init__(self, run_directory: Path, python_path: str) -> None:
        self._token = run_directory / TOKEN_FILE
        secret = secrets.token_hex(16)
        # On a full disk hosts see no such file, and take the directory for one that they do not share.
        with suppress(OSError):
            descriptor = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secret)
        self.hello: Message = {
            "type": "hello",
            "run_directory": str(run_directory),
            "token": secret,
            "python_path": python_path,
        }
        self._versions = own_versions(python_path)

    def close(self) -> None:
        """Take the file away: every host has looked."""
        with suppress(OSError):
            self._token.unlink(missing_ok=True)

    def refusal(self, ready: Message, setup: HostSetup) -> HostFailure | None:
        """Return why a host that has answered may not take part: it has another farandole."""
        mine, theirs = self._versions["farandole"], ready["versions"]["farandole"]
        if mine == theirs:
            return None
        return HostFailure(
            f"it has farandole {theirs}, this host has {mine}",
            elsewhere_remedy(setup.python),
            ConfigError.exit_code,
        )

    def warnings(self, host: str, ready: Message) -> list[str]:
        """Return what else is not alike."""
        return [f"warning: host {host}: {what}" for what in differences(self._versions, ready["versions"])]


def check_ready(message: Message) -> None:
    """Raise `FrameError` for an answer that is none."""
    versions = message["versions"]
    if not isinstance(versions, dict) or not all(isinstance(text, str) for text in versions.values()):
        raise FrameError(f"versions {versions!r}: expected texts")
    if not isinstance(message["address"], str) or "farandole" not in versions:
        raise FrameError("an answer without an address or a version")
