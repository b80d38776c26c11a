"""When a host is given up, and why: ssh failed, its connection ended, or it fell silent, or never answered.

And the handshake, by which it answers.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...core.framing import FrameError
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import elsewhere_remedy
from ..supervise.failure import HostFailure
from .frames import SILENCE_SECONDS, Message
from .host_link import HostLink
from .protocol import START_SECONDS, SUSPECT_SECONDS, TOKEN_FILE, differences, own_versions
from .remote_shell import NO_DIRECTORY, NO_PACKAGE, NO_PRELUDE, HostSetup

_BROKEN = 255
_HURRY_SECONDS = 0.5
"""Hosts may have heard nothing for a while before we stood still."""


def why_hung_up(link: HostLink, setup: HostSetup, now: float, *, stood_still_seconds: float = 0.0) -> HostFailure:
    """Return why the pipe has ended before the host said that it was done.

    `stood_still_seconds`: for how long we did, a moment ago.
    """
    code = link.wait(0.3)
    link.read_stderr()
    stderr = link.errors.decode(errors="replace")
    if not link.ready:
        return replace(explain(link.name, code, stderr, setup), exit_code=ConfigError.exit_code)
    if stood_still_seconds > SILENCE_SECONDS - _HURRY_SECONDS:
        cause = (
            f"this launcher stood still for {stood_still_seconds:.0f} s; hosts stop their ranks when they have "
            f"heard nothing for {SILENCE_SECONDS:g} s"
        )
        return HostFailure(cause, "was it stopped (Ctrl-Z), or its machine asleep?", is_ours=True)
    if link.silent_seconds(now) > SUSPECT_SECONDS:
        # It was silent before: its own reaper was a little faster than we are.
        return _silent(link)
    return explain_loss(code, stderr)


def why_silent(link: HostLink, now: float) -> HostFailure | None:
    """Return why a host that says nothing is given up; None: not yet."""
    if not link.ready:
        if now - link.opened_at <= START_SECONDS:
            return None
        return HostFailure(f"it did not answer within {START_SECONDS:g} s", f"try by hand: ssh {link.name} true")
    return _silent(link) if link.channel.patience.is_over(now) else None


def _silent(link: HostLink) -> HostFailure:
    patience = link.channel.patience
    cause = f"no sign of life for {patience.limit_seconds:.0f} s: frozen, switched off, or its link is cut"
    return HostFailure(cause, "look at its power, its cable and its load", when_seconds=patience.last_heard)


def nonsense(problem: Exception) -> HostFailure:
    """Return why a host is given up whose messages make no sense."""
    return HostFailure(f"what it says makes no sense: {problem}", "is it the same farandole?")


_KNOWN = (
    (r"Could not resolve hostname|Name or service not known", "its name is not known here",
     "check its spelling, or give its address"),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed",
     "if the host was installed anew: ssh-keygen -R {host}, then ssh {host} once; else this is an attack"),
    (r"Host key verification failed|host key is known", "its host key is not known",
     "compare the key while connecting by hand: ssh {host}"),
    (r"Too many authentication failures|Permission denied", "it refused our key",
     "ssh-copy-id {host}, or name a key with --ssh-identity-file"),
    (r"Connection refused", "no ssh server answers there", "start sshd on it, or give its port with --ssh-port"),
    (r"Connection timed out|No route to host|Network is unreachable|timed out", "it cannot be reached",
     "is it on, and is the cable in?"),
    (r"Bad configuration option|keyword .* extra arguments|Bad owner or permissions|no argument after keyword",
     "ssh does not accept its options", "see --ssh-option and ~/.ssh/config"),
    (r"kex_exchange_identification|Connection (closed|reset) by", "its ssh server hung up",
     "see the log of sshd on {host} (MaxStartups?)"),
)  # fmt: skip


def explain(host: str, code: int | None, stderr: str, setup: HostSetup) -> HostFailure:
    """Return why nothing was started on `host`, from the exit code of ssh and what it wrote to stderr."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if code == NO_DIRECTORY:
        return HostFailure(
            f"there is no directory {setup.directory}", "copy the project there, or name its place: --chdir"
        )
    if code == NO_PRELUDE:
        return HostFailure(f"the prelude failed: {last or setup.prelude}", "try it there by hand")
    if code == NO_PACKAGE:
        return HostFailure(last or "it has no farandole", elsewhere_remedy(setup.python))
    if code in (126, 127):
        return HostFailure(
            f"it has no {setup.python}" + (f" ({last})" if last else ""),
            "install it there, name it with --python, or make it known with --prelude 'source env.sh'",
        )
    for pattern, cause, remedy in _KNOWN:
        if re.search(pattern, stderr):
            detail = next((line for line in lines if re.search(pattern, line)), last)
            return HostFailure(f"{cause} ({detail})", remedy.format(host=host))
    how = "nothing was said" if code is None else f"exit code {code}"
    return HostFailure(f"ssh ended before anything was started: {last or how}", f"try by hand: ssh {host} true")


def explain_loss(code: int | None, stderr: str) -> HostFailure:
    """Return why the connection to a host ended in the middle of a job."""
    last = next(reversed([line.strip() for line in stderr.splitlines() if line.strip()]), "")
    if code is not None and code < 0:
        return HostFailure(
            f"its ssh was killed by signal {-code} ({signal.Signals(-code).name})",
            "the ssh process of this job was killed on the launcher's host",
        )
    # ssh returns 255 without a message if its process was killed, and with one if the connection broke.
    if code == _BROKEN and re.search(r"(?i)connection|broken pipe|disconnect|timeout|timed out", last):
        return HostFailure(f"the connection was lost: {last}", "look at its network and at the log of its sshd")
    detail = f" ({last})" if last else ""
    return HostFailure(f"its supervisor was killed{detail}", "look for the out-of-memory killer in its dmesg")


# The handshake with a host: the first message, its answer, and whether the host may take part.


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
