"""Run a command on the first host of an emulated network, play the script, count the bytes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.environ import env
from ...core.vocabulary.errors import LaunchError
from ..supervise.job_loop import ENDING, handling
from ..supervise.process import preparing
from .network import LinkBytes, Network
from .script import LinkChange

_TICK_SECONDS = 0.05


@dataclass(frozen=True)
class EmulatedRun:
    """How the command ended, and what crossed the links."""

    exit_code: int
    seconds: float
    links: list[LinkBytes]


def run_session(
    network: Network,
    command: Sequence[str],
    changes: Sequence[LinkChange],
    *,
    stdout: int | None = None,
    typed_command: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> EmulatedRun:
    """Run `command` as a process of host0 that knows all hosts; return when it has ended.

    Signals are passed on to it, and it dies with this process. `typed_command` is what the user typed: the run's
    records keep it.
    """
    typed = {} if not typed_command else {env.TYPED: json.dumps(list(typed_command))}
    environment = env.inherited_environment({env.HOSTS_FILE: str(network.hosts_file), **typed})
    before = network.link_bytes()
    begin = time.monotonic()
    try:
        child = subprocess.Popen(
            list(command),
            env=environment,
            stdout=stdout,
            start_new_session=True,
            preexec_fn=preparing((), network.hosts[0]),  # noqa: PLW1509 - forked from a process with one thread
        )
    except (OSError, subprocess.SubprocessError) as problem:
        raise LaunchError(f"cannot start {command[0]!r} on host0: {problem}") from None
    waiting = list(changes)
    with handling(ENDING, lambda number, _: child.send_signal(number)):
        try:
            while child.poll() is None:
                now = time.monotonic() - begin
                while waiting and waiting[0].seconds <= now:
                    change = waiting.pop(0)
                    change.apply(network)
                    say(f"{now:.1f} s: {change.to_text()}")
                time.sleep(_TICK_SECONDS)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    seconds = time.monotonic() - begin
    code = child.returncode
    links = _since(before, network.link_bytes())
    for host in sorted({link.host for link in before} - {link.host for link in links}):
        say(f"{host} is gone: the process that kept it was killed, and what crossed its links is not known")
    return EmulatedRun(code if code >= 0 else 128 - code, seconds, links)


def _since(before: list[LinkBytes], after: list[LinkBytes]) -> list[LinkBytes]:
    earlier = {(link.host, link.interface): link for link in before}
    return [
        LinkBytes(b.host, b.interface, b.sent_bytes - a.sent_bytes, b.received_bytes - a.received_bytes)
        for b in after
        if (a := earlier.get((b.host, b.interface))) is not None
    ]
