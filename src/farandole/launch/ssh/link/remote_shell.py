"""How a host is reached: the command line of ssh, what the host's shell is asked to do, and why ssh failed.

[Note: constant command] The text that the remote shell reads is a constant. Everything that differs (the
directory, the python, the prelude, the environment) comes over stdin, as lines that `read -r` takes literally
and as frames, so nothing of it is ever read as shell, and nothing of it shows in a list of processes. The one
exception is the prelude, which is shell on purpose.
"""

from __future__ import annotations

import ipaddress
import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from ....core.vocabulary.errors import ConfigError
from ...job.hosts import Host, LocalHost

CONNECT_SECONDS = 10
# Letters, digits, dots, hyphens, underscores; never a hyphen first, which ssh would take for an option.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}@)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")

_BROKEN = 255
NO_DIRECTORY, NO_PRELUDE, NO_PACKAGE = 96, 95, 94

_SCRIPT = """\
IFS= read -r directory; IFS= read -r python; IFS= read -r prelude; IFS= read -r code;\
 cd -- "$directory" || exit 96;\
 if [ -n "$prelude" ]; then\
 exec "$(command -v bash || command -v sh)" -c "eval \\"\\$1\\" </dev/null >&2 || exit 95;\
 exec \\"\\$2\\" -I -S -c \\"\\$3\\"" farandole "$prelude" "$python" "$code"; fi;\
 exec "$python" -I -S -c "$code"\
"""
REMOTE_COMMAND = f"exec /bin/sh -c '{_SCRIPT}'"
"""The same for every host and job. In single quotes, without one inside: every login shell reads it alike."""

AGENT = "farandole.launch.ssh.agent.agent"
_CODE = 'import json;told=json.loads(open(0,"rb",0,closefd=False).readline());exec(told["source"])'
_SOURCE = f"""
import importlib, sys
sys.path += told["paths"]
try:
    import farandole
except ImportError:
    import site
    site.main()
try:
    main = importlib.import_module(told["module"]).main
except ImportError as problem:
    sys.stderr.write("farandole cannot be imported by " + sys.executable + ": " + str(problem) + "\\n")
    sys.exit({NO_PACKAGE})
main()
"""


@dataclass(frozen=True)
class SshOptions:
    """How hosts are reached by ssh."""

    port: int | None = None
    identity_file: Path | None = None
    options: tuple[str, ...] = ()
    """Options of ssh's configuration, ``Name=value`` each."""
    command: tuple[str, ...] = ("ssh",)
    """What takes the place of ssh. It gets ssh's arguments unless one of its words is ``{host}``: it then gets
    its own words, with the host filled in, and the remote command."""


@dataclass(frozen=True)
class HostSetup:
    """What a host is asked to do before its ranks start."""

    directory: str
    python: str
    prelude: str = ""
    """Shell text to read first, for example ``source env.sh``."""

    def __post_init__(self) -> None:
        for what, text in (("--chdir", self.directory), ("--python", self.python), ("--prelude", self.prelude)):
            if any(character in text for character in "\n\r\0"):
                raise ConfigError(f"{what} {text!r}: expected a single line")
        if not self.directory:
            raise ConfigError("--chdir is empty", remedy="name a directory of the hosts")
        if not self.python or self.python.startswith("-"):
            raise ConfigError(f"--python {self.python!r}: expected a program of the hosts")

    def preamble(self, paths: list[str], module: str = AGENT) -> bytes:
        """Return the lines that the remote command reads; `paths` are where farandole may be imported from.

        `module` has the `main` to call.
        """
        told = json.dumps({"source": _SOURCE, "paths": paths, "module": module})
        lines = (self.directory, self.python, self.prelude, _CODE, told)
        # A name of a file need not be text: its bytes go as they are.
        return "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")


def check_name(name: str) -> str:
    """Return a host's name that can be given to ssh; raise `ConfigError` for any other text."""
    if _NAME.fullmatch(name):
        return name
    try:
        ipaddress.IPv6Address(name)
    except ValueError:
        pass
    else:
        if re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?", name):
            return name
    raise ConfigError(
        f"{name!r} is no name of a host",
        remedy="expected letters, digits, dots, hyphens and underscores, not a hyphen first",
    )


def ssh_command(host: str, port: int | None, options: SshOptions) -> list[str]:
    """Return the command that runs `REMOTE_COMMAND` on `host`; nothing in it is secret."""
    host = check_name(host)
    if any("{host}" in word for word in options.command):
        return [*(word.replace("{host}", host) for word in options.command), REMOTE_COMMAND]
    words = [
        *options.command, "-T", "-x",
        *(word for option in options.options for word in ("-o", option)),  # the first value wins
        "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ClearAllForwardings=yes",
        "-o", "ControlMaster=no", "-o", "RemoteCommand=none", "-o", "EscapeChar=none",
    ]  # fmt: skip
    wanted_port = port if port is not None else options.port
    if wanted_port is not None:
        words += ["-p", str(wanted_port)]
    if options.identity_file is not None:
        words += ["-i", str(options.identity_file)]
    return [*words, "--", host, REMOTE_COMMAND]


def connecting_command(host: Host, options: SshOptions) -> list[str]:
    """Return what connects us to a host: nothing but a shell when it is this machine and no ssh port is named."""
    if isinstance(host, LocalHost) and host.port is None:
        return ["/bin/sh", "-c", REMOTE_COMMAND]
    return ssh_command(host.name, host.port, options)


@dataclass(frozen=True)
class Trouble:
    """Why a host could not be used, and what to do."""

    cause: str
    remedy: str = ""


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


def explain(host: str, code: int | None, said: str, setup: HostSetup) -> Trouble:
    """Return why nothing was started on `host`, of the exit code of ssh and what it said on stderr."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if code == NO_DIRECTORY:
        return Trouble(
            f"there is no directory {setup.directory}", "copy the project there, or name its place: --chdir"
        )
    if code == NO_PRELUDE:
        return Trouble(f"the prelude failed: {last or setup.prelude}", "try it there by hand")
    if code == NO_PACKAGE:
        return Trouble(
            last or "it has no farandole", f"install the same version there: {setup.python} -m pip install"
        )
    if code in (126, 127):
        return Trouble(
            f"it has no {setup.python}" + (f" ({last})" if last else ""),
            "install it there, name it with --python, or make it known with --prelude 'source env.sh'",
        )
    for pattern, cause, remedy in _KNOWN:
        if re.search(pattern, said):
            detail = next((line for line in lines if re.search(pattern, line)), last)
            return Trouble(f"{cause} ({detail})", remedy.format(host=host))
    how = "nothing was said" if code is None else f"exit code {code}"
    return Trouble(f"ssh ended before anything was started: {last or how}", f"try by hand: ssh {host} true")


def explain_loss(code: int | None, said: str) -> Trouble:
    """Return why the connection to a host ended in the middle of a job."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if code is not None and code < 0:
        return Trouble(
            f"its ssh was killed by signal {-code} ({signal.Signals(-code).name})",
            "the ssh process of this job was killed on the launcher's host",
        )
    # ssh returns 255 without a message if its process was killed, and with one if the connection broke.
    if code == _BROKEN and re.search(r"(?i)connection|broken pipe|disconnect|timeout|timed out", last):
        return Trouble(f"the connection was lost: {last}", "look at its network and at the log of its sshd")
    detail = f" ({last})" if last else ""
    return Trouble(f"its supervisor was killed{detail}", "look for the out-of-memory killer in its dmesg")
