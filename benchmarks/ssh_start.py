"""What a start over ssh costs: 8 processes on 4 hosts with an sshd each, beside the script's own start.

python benchmarks/ssh_start.py [starts]      (root, and openssh-server; from the root of a checkout)

Hosts are namespaces of this machine. The same 8 processes are started at once without any launcher, in turns,
so that what else goes on hits both. At the end: what is left of all starts, which has to be nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.net.cluster import Cluster, cluster

HOSTS, RANKS = 4, 8


def start(made: Cluster, directory: Path, script: Path) -> float:
    names = ",".join(f"host{index}:{RANKS // HOSTS}" for index in range(HOSTS))
    begin = time.perf_counter()
    done = made.run(
        "run", "-np", str(RANKS), "-H", names, "--quiet", *made.options, "--", sys.executable, str(script),
        cwd=directory, seconds=60,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"a start failed:\n{done.stderr}")
    return seconds


def start_alone(script: Path) -> float:
    begin = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, str(script)]) for _ in range(RANKS)]
    for process in processes:
        process.wait()
    return time.perf_counter() - begin


def left(made: Cluster) -> dict[str, int]:
    below = [each for server in made.servers for each in psutil.Process(server.pid).children(recursive=True)]
    return {
        "processes": len(below),
        "files": sum(1 for place in ("/tmp", "/dev/shm") for _ in Path(place).glob("farandole-run-*")),
        "sockets": sum(1 for each in psutil.net_connections() if each.laddr and each.laddr.port == 2222),
    }


def main() -> None:
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        script = directory / "nothing.py"
        script.write_text("pass\n")
        with cluster(directory, HOSTS) as made:
            start(made, directory, script)
            with_ssh, alone = [], []
            for _ in range(starts):
                with_ssh.append(start(made, directory, script))
                alone.append(start_alone(script))
            time.sleep(1.0)
            remains = left(made)
    result = {
        "starts": starts,
        "median_seconds": round(statistics.median(with_ssh), 3),
        "worst_seconds": round(max(with_ssh), 3),
        "script_alone_seconds": round(statistics.median(alone), 3),
        "added_seconds": round(statistics.median(with_ssh) - statistics.median(alone), 3),
        "left": remains,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
