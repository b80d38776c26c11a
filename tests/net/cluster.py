"""Hosts with a real sshd each: namespaces of this machine, with keys and files of their own in one directory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from farandole.launch.job.hosts import HostNamespaces, entering, in_network_of
from farandole.launch.namespaces import Network
from farandole.launch.supervise.process import dying_with_us

PORT = 2222
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def why_impossible() -> str:
    """Return what keeps this user from running an sshd a host; nothing when they can."""
    if SSHD is None or shutil.which("ssh") is None:
        return "needs sshd and ssh (apt-get install openssh-server openssh-client)"
    return "" if os.geteuid() == 0 else "sshd in a namespace needs root"


@dataclass
class Cluster:
    """Hosts, and the options by which `farandole run` reaches them."""

    directory: Path
    """Keys and configuration."""
    network: Network
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def options(self) -> list[str]:
        """Options of `farandole run`."""
        words = ["-p", str(PORT), "-i", str(self.directory / "user_key")]
        for option in (
            f"UserKnownHostsFile={self.directory / 'known_hosts'}", "GlobalKnownHostsFile=/dev/null",
            "IdentitiesOnly=yes", "StrictHostKeyChecking=yes",
        ):  # fmt: skip
            words += ["--ssh-option", option]
        return words

    def popen(
        self, words: Sequence[str], *, cwd: Path, host: int = 0, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command as a process of a host, in a session of its own."""
        return subprocess.Popen(
            list(words), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, **(environment or {})},
            preexec_fn=_entering_in(self.network.hosts[host], cwd),  # noqa: PLW1509 - one thread
        )  # fmt: skip

    def run(
        self, *words: str, cwd: Path, host: int = 0, seconds: float = 30, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a farandole command on a host to its end."""
        with self.popen([*FARANDOLE, *words], cwd=cwd, host=host, environment=environment) as process:
            try:
                out, err = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(list(words), process.returncode, out, err)


FARANDOLE = [sys.executable, "-m", "farandole"]


@contextmanager
def cluster(directory: Path, host_count: int) -> Iterator[Cluster]:
    """Make hosts ``host0``, ``host1``, ... and take all of them away again."""
    made = Cluster(directory, Network(host_count, 4, None))
    _make_key(directory / "user_key")
    shutil.copy(directory / "user_key.pub", directory / "authorized_keys")
    with made.network:
        lines = []
        try:
            for host in made.network.hosts:
                key = directory / f"{host.name}_key"
                _make_key(key)
                public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
                lines += [f"[{name}]:{PORT} {public}\n" for name in (host.name, host.address)]
                made.servers.append(start_server(directory, host, key))
            (directory / "known_hosts").write_text("".join(lines))
            for host in made.network.hosts:
                _wait_for(host)
            yield made
        finally:
            for server in made.servers:
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def start_server(directory: Path, host: HostNamespaces, key: Path) -> subprocess.Popen[bytes]:
    """Start the sshd of a host."""
    config = directory / f"{host.name}_config"
    config.write_text(
        f"Port {PORT}\nListenAddress {host.address}\nHostKey {key}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {directory / 'authorized_keys'}\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUseDNS no\nMaxStartups 100\n"
        # Sessions start with the account's home: what they compile goes into the tests' cache, as all else.
        f"SetEnv XDG_CACHE_HOME={os.environ['XDG_CACHE_HOME']}\n"
    )
    # A /run of its own: sshd wants its directory there, and this machine's is none of our business.
    start = f"mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec {SSHD} -D -e -f {config}"
    with (directory / f"{host.name}_sshd.log").open("wb") as log:
        return subprocess.Popen(
            ["/bin/sh", "-c", start], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=_entering_for_life(host),  # noqa: PLW1509 - one thread
        )  # fmt: skip


def _entering_for_life(host: HostNamespaces) -> Callable[[], None]:
    """A server ends with the test, however that ends."""
    bind, enter = dying_with_us(), entering(host)

    def prepare() -> None:
        bind()
        enter()

    return prepare


def _entering_in(host: HostNamespaces, cwd: Path) -> Callable[[], None]:
    enter = entering(host)

    def prepare() -> None:
        enter()
        os.chdir(cwd)  # entering leaves us where the test is

    return prepare


def _make_key(path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _wait_for(host: HostNamespaces) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            in_network_of(host, lambda: socket.create_connection((host.address, PORT), 1)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
