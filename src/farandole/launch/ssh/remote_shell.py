"""How a host is reached: the command line of ssh, and what the host's shell is asked to do.

[Note: constant command] The text that the remote shell reads is a constant. Everything that differs (the
directory, the python, the prelude, the environment) comes over stdin, as lines that `read -r` takes literally
and as frames, so nothing of it is ever read as shell, and nothing of it shows in a list of processes. The one
exception is the prelude, which is shell on purpose.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ..job.hosts import Host, LocalHost, is_ipv6

CONNECT_SECONDS = 10
# Letters, digits, dots, hyphens, underscores; never a hyphen first, which ssh would take for an option.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}@)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")

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

AGENT = "farandole.launch.ssh.agent"
_CODE = 'import json;start=json.loads(open(0,"rb",0,closefd=False).readline());exec(start["source"])'
_SOURCE = f"""
import importlib, sys
sys.path += start["paths"]
try:
    import farandole
except ImportError:
    import site
    site.main()
try:
    main = importlib.import_module(start["module"]).main
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
        start = json.dumps({"source": _SOURCE, "paths": paths, "module": module})
        lines = (self.directory, self.python, self.prelude, _CODE, start)
        # A name of a file need not be text: its bytes go as they are.
        return "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")


def check_name(name: str) -> str:
    """Return a host's name that can be given to ssh; raise `ConfigError` for any other text."""
    if _NAME.fullmatch(name) or is_ipv6(name):
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
