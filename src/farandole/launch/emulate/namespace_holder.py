"""The namespace holder: an idle process that owns one host's namespaces.

[Note: nothing is left] The namespaces of an emulated host have no name in the file system. They live as
long as a process is in them: the holder and the host's ranks. The holder dies with its maker
(PR_SET_PDEATHSIG), the ranks with their launcher, and the kernel then takes interfaces, links and
shaping away. So there is nothing to clean up after a kill -9, now or at the next start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from ...core.vocabulary.errors import LaunchError
from ..job.hosts import CLONE_NEWUSER, HOST_NAMESPACES
from ..supervise.process import dying_with_us

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


@dataclass(frozen=True)
class NamespaceHolder:
    """A process in namespaces of its own."""

    pid: int

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def become_root_here() -> None:
    """Enter a user namespace in which this process may make networks; for those who are not root.

    Raises `LaunchError` with the one line that says what is missing.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER):
        raise LaunchError(
            f"emulating hosts needs root or user namespaces, and this kernel refuses them: "
            f"{os.strerror(ctypes.get_errno())}",
            remedy="run as root, or: sysctl -w user.max_user_namespaces=1000 "
            "(and kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu)",
        )
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - one write call, as the kernel asks
                file.write(text)
    except OSError as problem:
        raise LaunchError(f"emulating hosts needs root: {problem}", remedy="run as root") from None


def start_keeper(name: str, hosts_file: str | None) -> NamespaceHolder:
    """Start a keeper whose host is called `name`, with `hosts_file` instead of /etc/hosts."""
    libc = ctypes.CDLL(None, use_errno=True)
    die_with_us = dying_with_us()
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(here)
            problem = _live(libc, die_with_us, name, hosts_file)
            os.write(there, problem.encode() or b"ready")
            os.close(there)
            while not problem:
                signal.pause()
        finally:
            os._exit(1)
    os.close(there)
    answer = os.read(here, 4096).decode()
    os.close(here)
    if answer != "ready":
        os.waitpid(pid, 0)
        raise LaunchError(
            f"this machine cannot make host {name}: {answer or 'its keeper died'}",
            remedy="network namespaces are needed (root, or user namespaces; not inside most containers)",
        )
    return NamespaceHolder(pid)


def _live(libc: ctypes.CDLL, die_with_us: Callable[[], None], name: str, hosts_file: str | None) -> str:
    """Take the namespaces; return what went wrong, or nothing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    die_with_us()
    os.setsid()
    if libc.unshare(HOST_NAMESPACES):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    socket.sethostname(name)
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    if hosts_file is not None and libc.mount(hosts_file.encode(), b"/etc/hosts", None, _MS_BIND, None):
        return f"mount /etc/hosts: {os.strerror(ctypes.get_errno())}"
    return ""
