"""Many starts over ssh, one after another, and what each leaves behind, which has to be nothing.

python benchmarks/consecutive_starts.py [starts]      (root, and openssh-server; from the root of a checkout)

4 ranks on 2 hosts that are namespaces of this machine with an sshd each. Every twentieth start trains a small
model with torch, the others run a script that meets at the rendezvous port; every tenth start is ended by
kill -9 of the launcher, at a random moment. After each start is looked for: processes in the hosts or with the
start's mark in their environment, the namespaces of such processes, listening ports and connections in the
hosts, files in /dev/shm and in the hosts' directory for temporary files. Exit code 1 when anything is left.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shared import ROOT, markdown

sys.path.insert(0, str(ROOT))

from tests.net.cluster import FARANDOLE, PORT, Cluster, cluster

PATIENCE_SECONDS = 5.0
"""After the launcher's end, for the rest to go; what is there then is left behind."""
KINDS = ("processes", "namespaces", "ports", "shared memory", "files")

MEET = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(address) as server:
        peers = [server.accept()[0] for _ in range(size - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection(address, 5)]
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
if sys.argv[1] == "stay":
    time.sleep(600)
"""

TRAIN = """
import sys, torch, farandole as fd
fd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
step = 0
while sys.argv[1] == "stay" or step < 5:
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    step += 1
fd.shutdown()
"""


@dataclass
class Kind:
    """Starts of one kind."""

    seconds: list[float] = field(default_factory=list)
    clean_seconds: list[float] = field(default_factory=list)
    """From the launcher's end until nothing was left."""
    left: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))


class Traces:
    """What starts could leave behind: what is there beyond what was there before the first."""

    def __init__(self, made: Cluster, directory: Path) -> None:
        self._hosts = made.network.hosts
        self._directory = directory
        self._networks = {namespace(host.keeper, "net") for host in self._hosts}
        self.commands: dict[str, str] = {}
        """What processes are, by their number."""
        self._before = self._look("")

    def left(self, mark: str) -> dict[str, set[str]]:
        """Return what is there of a start by now, by kind."""
        return {kind: found - self._before[kind] for kind, found in self._look(mark).items()}

    def _look(self, mark: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {kind: set() for kind in KINDS}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                network = namespace(process.name, "net")
                marked = bool(mark) and mark.encode() in (process / "environ").read_bytes()
                if network in self._networks or marked:
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command:  # one without is dead, and waits for its parent
                        found["processes"].add(process.name)
                        self.commands[process.name] = command[:100]
                    found["namespaces"] |= {
                        namespace(process.name, each.name) for each in (process / "ns").iterdir()
                    }
            except OSError:
                continue  # it is gone
        for host in self._hosts:
            for name in ("tcp", "tcp6"):
                for line in Path(f"/proc/{host.keeper}/net/{name}").read_text().splitlines()[1:]:
                    _, local, _, state, *_ = line.split()
                    port = int(local.rpartition(":")[2], 16)
                    # 06: TIME_WAIT, the kernel's own memory of a connection; nobody holds it.
                    if state != "06" and not (port == PORT and state == "0A"):
                        found["ports"].add(f"{host.name}:{port} state {state}")
            shared = Path(f"/proc/{host.keeper}/root/dev/shm")
            found["shared memory"] |= {f"{host.name}:/dev/shm/{path.name}" for path in shared.iterdir()}
        found["files"] = {str(path) for path in self._directory.rglob("*")}
        return found


def namespace(process: int | str, kind: str) -> str:
    """Return which namespace a process is in; raise OSError when it is gone."""
    return str(Path(f"/proc/{process}/ns/{kind}").readlink())


def lives_in(process: str, networks: set[str]) -> bool:
    try:
        return namespace(process, "net") in networks
    except OSError:
        return False


def own_shared_memory(made: Cluster) -> None:
    """Give each host a /dev/shm of its own: this machine's belongs to others too."""
    for host in made.network.hosts:
        words = ["mount", "-t", "tmpfs", "none", "/dev/shm"]
        subprocess.run(["nsenter", f"--mount=/proc/{host.keeper}/ns/mnt", *words], check=True)


def start(made: Cluster, directory: Path, mark: str, *, torch: bool, kill_after_seconds: float | None) -> float:
    """Run one start to its end; return its seconds."""
    text = "train.py" if torch else "meet.py"
    python = [sys.executable] if torch else [sys.executable, "-S"]
    command = [
        *FARANDOLE, "run", "-np", "4", "-H", "host0:2,host1:2", "--no-bind", "--quiet",
        "--run-dir", str(directory / "runs" / mark), "--prelude", f"export TMPDIR={directory / 'temporary'}",
        # torch makes this directory, and means it to stay.
        "-x", f"FARANDOLE_START={mark}", "-x", f"TORCHINDUCTOR_CACHE_DIR={directory / 'cache'}",
        *made.options, "--", *python, str(directory / text), "leave" if kill_after_seconds is None else "stay",
    ]  # fmt: skip
    surroundings = {"FARANDOLE_START": mark, "TMPDIR": str(directory / "temporary")}
    begin = time.monotonic()
    with made.popen(command, cwd=directory, environment=surroundings) as launcher:
        try:
            said = launcher.communicate(timeout=600 if kill_after_seconds is None else kill_after_seconds)[1]
        except subprocess.TimeoutExpired:
            launcher.kill()
            said = launcher.communicate()[1]
            if kill_after_seconds is None:
                raise SystemExit(f"{mark} did not end:\n{said}") from None
        finally:
            launcher.kill()  # when we are interrupted
        if launcher.returncode not in (0, -9):
            raise SystemExit(f"{mark} failed:\n{said}")
    return time.monotonic() - begin


def wait_until_clean(look: Callable[[], dict[str, set[str]]]) -> tuple[float, dict[str, set[str]]]:
    """Return how long it took, and what is left in spite of it."""
    begin = time.monotonic()
    while True:
        left = look()
        waited = time.monotonic() - begin
        if not any(left.values()) or waited > PATIENCE_SECONDS:
            return waited, left
        time.sleep(0.02)


def measure(starts: int, made: Cluster, directory: Path, kinds: dict[str, Kind]) -> None:
    """Do all starts; note what became of them, by kind."""
    chance = random.Random(0)
    traces = Traces(made, directory / "temporary")
    for number in range(1, starts + 1):
        torch, killed = number % 20 in (5, 0), number % 10 == 0
        # Python and ssh take 0.3 s, torch 2 s more: some are killed while they start, some later.
        moment = chance.uniform(0.05, 6.0 if torch else 1.5) if killed else None
        mark = f"start-{number}"
        kind = kinds[f"{'torch' if torch else 'plain'}, {'kill -9' if killed else 'to its end'}"]
        kind.seconds.append(start(made, directory, mark, torch=torch, kill_after_seconds=moment))
        waited, left = wait_until_clean(lambda mark=mark: traces.left(mark))  # type: ignore[misc]
        kind.clean_seconds.append(waited)
        for what, found in left.items():
            kind.left[what] += len(found)
            for each in sorted(found):
                print(f"{mark} left of {what}: {each} {traces.commands.get(each, '')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("starts", nargs="?", type=int, default=200, help="how many")
    starts = parser.parse_args().starts
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        directory = Path(name)
        for made_here in ("runs", "temporary"):
            (directory / made_here).mkdir()
        (directory / "meet.py").write_text(MEET)
        (directory / "train.py").write_text(TRAIN)
        with cluster(directory, 2) as made:
            own_shared_memory(made)
            begin = time.monotonic()
            kinds: dict[str, Kind] = defaultdict(Kind)
            with suppress(KeyboardInterrupt):  # what was done until then counts
                measure(starts, made, directory, kinds)
            seconds = time.monotonic() - begin
            networks = {namespace(host.keeper, "net") for host in made.network.hosts}
        time.sleep(1.0)  # the hosts' own processes are ended from outside
        after = [each for each in Path("/proc").glob("[0-9]*") if lives_in(each.name, networks)]
    rows = []
    for kind, found in sorted(kinds.items()):
        ordered = sorted(found.seconds)
        seconds_of = [ordered[len(ordered) // 2], ordered[-1], max(found.clean_seconds, default=0.0)]
        cells = [f"{each:.2f} s" for each in seconds_of]
        rows.append([kind, len(found.clean_seconds), *cells, *(found.left[what] for what in KINDS)])
    print(markdown(f"start | count | median | longest | clean after, longest | {' | '.join(KINDS)}", rows))
    done = sum(len(found.clean_seconds) for found in kinds.values())
    print(f"{done} starts in {seconds:.0f} s; load of the machine at the end {os.getloadavg()[0]:.1f}")
    if after:
        print(f"the hosts are gone, but not their processes: {', '.join(each.name for each in after)}")
    if after or any(sum(found.left.values()) for found in kinds.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
