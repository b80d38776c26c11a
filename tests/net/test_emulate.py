"""`farandole emulate` with real processes: places, shaped links, counted bytes, and what is left (nothing)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import farandole
from farandole.core.host.open_sockets import IN_USE
from tests.ranks.test_launch import FARANDOLE, alive, gone_within, run, script

pytestmark = pytest.mark.net

LEAST_SHARE = 0.85
"""Of the time a link's rate asks for; the token buckets are full at the start."""

# What a rank is told, and what it sees.
PLACE = """
import fcntl, json, os, socket, struct
keys = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "FARANDOLE_NODE_RANK",
        "FARANDOLE_NODE_COUNT", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
with socket.socket() as s:
    address = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", b"eth0"))[20:24]  # SIOCGIFADDR
seen = {
    "host": socket.gethostname(),
    "address": socket.inet_ntoa(address),
    "interfaces": [line.split(":")[0].strip() for line in open("/proc/self/net/dev").readlines()[2:]],
    "names": [socket.gethostbyname(f"host{i}") for i in range(2)],
    "environment": [os.environ[key] for key in keys],
}
json.dump(seen, open(f"place.{os.environ['RANK']}.json", "w"))
"""

# argv[1] says who sends to whom, "1-0,2-0", argv[2] how many bytes each. A receiver writes how long it took;
# its clock starts before any of its senders does, so it never shows less than the links needed.
TRANSFER = """
import os, select, socket, sys, threading, time
rank, count = int(os.environ["RANK"]), int(sys.argv[2])
pairs = [tuple(map(int, word.split("-"))) for word in sys.argv[1].split(",")]

def connect(receiver):
    for _ in range(400):
        try:
            return socket.create_connection((f"host{receiver}", 5000))
        except ConnectionRefusedError:
            time.sleep(0.02)

def send(peer):
    peer.sendall(bytes(count))
    peer.close()

def receive(peers):
    begin, seen = time.monotonic(), 0
    for peer in peers:
        peer.sendall(b"!")
    while peers:
        for peer in select.select(peers, [], [])[0]:
            if data := peer.recv(1 << 16):
                seen += len(data)
            else:
                peers.remove(peer)
    open(f"seconds.{rank}", "w").write(str(time.monotonic() - begin))
    return seen

senders = [pair[0] for pair in pairs if pair[1] == rank]
if senders:
    with socket.create_server((socket.gethostname(), 5000)) as server:
        peers = [server.accept()[0] for _ in senders]
    assert receive(peers) == count * len(senders)
peers = [connect(pair[1]) for pair in pairs if pair[0] == rank]
for peer in peers:
    peer.recv(1)
for peer in peers:
    threading.Thread(target=send, args=[peer]).start()
"""

# Rank 1 sends until rank 0 has seen a long silence, and data after it.
STREAM = """
import json, os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server((socket.gethostname(), 5000)) as server:
        peer = server.accept()[0]
    begin = last = time.monotonic()
    peer.sendall(b"!")
    seen = len(peer.recv(1 << 16))
    while True:
        count, now = len(peer.recv(1 << 16)), time.monotonic()
        assert now - begin < 25, "no silence was heard"
        if now - last > 0.6:
            break
        seen, last = seen + count, now
    json.dump({"seconds": last - begin, "bytes": seen, "silence": now - last}, open("stream.json", "w"))
else:
    for _ in range(400):
        try:
            peer = socket.create_connection(("host0", 5000))
            break
        except OSError:
            time.sleep(0.02)
    peer.recv(1)
    try:
        while True:
            peer.sendall(bytes(1 << 14))
    except OSError:
        pass  # the other has heard enough
"""

# Every rank starts a child of its own, and writes down both and its network.
WAITS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
text = f"{os.getpid()} {child.pid} {os.stat('/proc/self/ns/net').st_ino}"
open(f"new.{os.environ['RANK']}", "w").write(text)
os.rename(f"new.{os.environ['RANK']}", f"up.{os.environ['RANK']}")
time.sleep(600)
"""

# Three connections; the fastest handshake takes one way there and one way back.
HANDSHAKE = """
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server((socket.gethostname(), 5000)) as server:
        for _ in range(3):
            server.accept()[0].close()
else:
    taken = []
    while len(taken) < 3:
        begin = time.monotonic()
        try:
            socket.create_connection(("host0", 5000)).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            taken.append(time.monotonic() - begin)
    open("handshake", "w").write(str(min(taken)))
"""


def emulate(directory: Path, options: Sequence[str], text: str, *words: str) -> dict[str, Any]:
    """Run the script `text` on emulated hosts; return what ``--json`` says."""
    command = [sys.executable, script(directory, text), *words]
    result = run(directory, "emulate", *options, "--json", "--", *command)
    assert result.returncode == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout)
    return said


def links(said: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (sent, received) bytes of each link."""
    return {
        f"{link['host']} {link['interface']}": (link["sent_bytes"], link["received_bytes"])
        for link in said["links"]
    }


def seconds(directory: Path, receiver: int) -> float:
    return float((directory / f"seconds.{receiver}").read_text())


@pytest.mark.full("further")
def test_each_rank_sees_its_own_host(tmp_path: Path) -> None:
    said = emulate(tmp_path, ["--hosts", "2", "--slots", "2"], PLACE)
    assert said["exit_code"] == 0
    assert sorted(links(said)) == ["host0 eth0", "host1 eth0"]
    for rank, (host, seat) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        seen = json.loads((tmp_path / f"place.{rank}.json").read_text())
        assert seen == {
            "host": f"host{host}",
            "address": f"10.211.0.{host + 1}",
            "interfaces": seen["interfaces"],
            "names": ["10.211.0.1", "10.211.0.2"],
            "environment": [f"{rank}", f"{seat}", "2", f"{host}", "2", f"{host}", "2", "10.211.0.1", "eth0"],
        }
        # The kernel may add tunnels of its own to every network; they are down.
        assert {"lo", "eth0"} <= set(seen["interfaces"])
        assert not {name for name in seen["interfaces"] if name.startswith(("to", "port", "bridge"))}


NAMED = """
import os, socket, torch, farandole as fd
world = fd.init(progress=False)
total = torch.full((1000,), world.rank + 1.0)
torch.distributed.all_reduce(total)
circle = [os.environ["HOROVOD_CROSS_RANK"], os.environ["HOROVOD_CROSS_SIZE"]]
print(world.rank, socket.gethostname(), world.local_rank, world.node_rank, *circle, total[0].item())
"""


@pytest.mark.full("slow")
def test_hosts_by_name_in_any_order_with_unequal_slots(tmp_path: Path) -> None:
    words = ["emulate", "--hosts", "2", "--", "farandole", "run", "-H", "host1:2,localhost:1"]
    result = run(tmp_path, *words, "--", script(tmp_path, NAMED))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "[0] 0 host1 0 0 0 2 6.0", "[1] 1 host1 1 0 0 1 6.0", "[2] 2 host0 0 1 1 2 6.0",
    ]  # fmt: skip


def test_ranks_of_emulated_hosts_begin_again(tmp_path: Path) -> None:
    text = "import os, socket; generation = os.environ['FARANDOLE_GENERATION']\n"
    text += "generation == '0' and os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\n"
    text += "print(generation, socket.gethostname())"
    words = ["farandole", "run", "--restarts", "1", "--quiet", "--", sys.executable, "-S", "-c", text]
    result = run(tmp_path, "emulate", "--hosts", "2", "--", *words)
    assert result.returncode == 0, result.stderr
    assert {"[0] 1 host0", "[1] 1 host1"} <= set(result.stdout.splitlines())
    assert "rank 1 on host1 failed: killed by signal 9" in result.stderr


@pytest.mark.full("further")
@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
def test_a_link_is_as_slow_as_it_should_be_and_bytes_are_counted(
    tmp_path: Path, sender: int, receiver: int
) -> None:
    count, rate = 3_000_000, 50e6
    said = emulate(tmp_path, ["--rate", "50mbit"], TRANSFER, f"{sender}-{receiver}", str(count))
    assert seconds(tmp_path, receiver) >= LEAST_SHARE * count * 8 / rate
    sent, _ = links(said)[f"host{sender} eth0"]
    _, received = links(said)[f"host{receiver} eth0"]
    assert count < sent < 1.05 * count
    assert count < received < 1.05 * count
    # Acknowledgements come back, and nothing else.
    assert links(said)[f"host{sender} eth0"][1] < 0.05 * count
    assert links(said)[f"host{receiver} eth0"][0] < 0.05 * count


@pytest.mark.full("further")
@pytest.mark.parametrize("pairs", ["1-0,2-0", "0-1,0-2"])
def test_both_directions_of_a_link_are_shaped(tmp_path: Path, pairs: str) -> None:
    # Two hosts share the downloads, or the uploads, of a third.
    count, rate = 1_500_000, 50e6
    emulate(tmp_path, ["--hosts", "3", "--rate", "50mbit"], TRANSFER, pairs, str(count))
    longest = max(float(path.read_text()) for path in tmp_path.glob("seconds.*"))
    assert longest >= LEAST_SHARE * 2 * count * 8 / rate


@pytest.mark.full("further")
def test_a_pair_with_a_rate_of_its_own_uses_its_direct_link(tmp_path: Path) -> None:
    count, rate = 2_000_000, 40e6
    options = ["--hosts", "3", "--rate", "1gbit", "--rate-between", "1,0=40mbit"]
    said = emulate(tmp_path, options, TRANSFER, "1-0", str(count))
    assert seconds(tmp_path, 0) >= LEAST_SHARE * count * 8 / rate
    found = links(said)
    assert sorted(found) == ["host0 eth0", "host0 to1", "host1 eth0", "host1 to0", "host2 eth0"]
    assert count < found["host1 to0"][0] < 1.05 * count
    assert count < found["host0 to1"][1] < 1.05 * count
    assert max(found["host1 eth0"] + found["host0 eth0"]) < 0.05 * count


@pytest.mark.full("further")
def test_a_script_changes_a_rate_cuts_and_restores(tmp_path: Path) -> None:
    changes = "0s:1=40mbit,1.5s:1=cut,2.4s:1=restore,7s:cut,7.9s:restore"  # twice, for a slow start
    command = [sys.executable, script(tmp_path, STREAM)]
    result = run(tmp_path, "emulate", "--rate", "1gbit", "--script", changes, "--", *command)
    assert result.returncode == 0, result.stderr
    stream = json.loads((tmp_path / "stream.json").read_text())
    full_buckets = 2 * 80_000
    assert 0 < stream["bytes"] <= 40e6 / 8 * stream["seconds"] + full_buckets
    for text in ("40 Mbit/s", "cut", "restore"):
        assert f" s: the link of host1: {text}" in result.stderr


def test_a_delay_is_there_or_refused(tmp_path: Path) -> None:
    command = [sys.executable, script(tmp_path, HANDSHAKE)]
    result = run(tmp_path, "emulate", "--latency", "20ms", "--rate", "100mbit", "--", *command)
    if result.returncode == 0:
        assert float((tmp_path / "handshake").read_text()) >= 0.95 * 2 * 0.020
        return
    assert result.returncode == 2, result.stderr
    assert result.stderr == (
        "farandole: --latency 20ms: this kernel cannot delay packets; "
        "load its module with `modprobe sch_netem`, or leave --latency out\n"
    )


def usual() -> str:
    """Return what hosts use on this machine when nothing is asked for."""
    allowed = (IN_USE.parent / "tcp_allowed_congestion_control").read_text().split()
    return next((name for name in ["cubic", *allowed] if name in allowed and name != "bbr"), "bbr")


@pytest.mark.parametrize(("options", "asked"), [([], None), (["--congestion-control", "reno"], "reno")])
def test_tcp_of_the_hosts_is_linuxs_own_or_the_one_that_is_asked_for(
    tmp_path: Path, options: list[str], asked: str | None
) -> None:
    # Whatever this machine uses itself: the same emulated link means the same everywhere, where it can.
    used = asked or usual()
    tells = "import os; print(open('/proc/sys/net/ipv4/tcp_congestion_control').read().strip())"
    before = IN_USE.read_text()
    result = run(tmp_path, "emulate", *options, "--", sys.executable, script(tmp_path, tells))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == ["[0]", "[1]", used, used]
    assert IN_USE.read_text() == before
    [facts] = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/run.json")]
    assert facts["congestion_control"] == used
    assert ("not cubic" in result.stderr) is (asked is None and used != "cubic")


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_is_passed_on(tmp_path: Path, code: int) -> None:
    result = run(
        tmp_path, "emulate", "--json", "--", sys.executable, script(tmp_path, f"raise SystemExit({code})")
    )
    assert result.returncode == code, result.stderr
    assert json.loads(result.stdout)["exit_code"] == code


@pytest.mark.full("further")
def test_a_host_whose_keeper_was_killed_is_named_and_the_command_ends_as_it_did(tmp_path: Path) -> None:
    text = "import json, os, sys, time; hosts = json.load(open(os.environ['FARANDOLE_HOSTS']))\n"
    text += "os.kill(hosts[1]['keeper'], 9); time.sleep(0.3); sys.exit(3)"
    result = run(tmp_path, "emulate", "--hosts", "2", "--rate", "100mbit", "--", sys.executable, "-S", "-c", text)
    assert result.returncode == 3
    assert "farandole: host1 is gone: the process that kept it was killed" in result.stderr
    assert "Traceback" not in result.stderr
    assert "host0" in result.stderr


@pytest.mark.full("further")
def test_a_farandole_command_keeps_its_own_options(tmp_path: Path) -> None:
    words = ["farandole", "run", "-np", "3", "--", sys.executable, script(tmp_path, "print('here')")]
    result = run(tmp_path, "emulate", "--hosts", "2", "--slots", "2", "--", *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("here") == 3
    result = run(tmp_path, "emulate", "--hosts", "2", "--", *words)
    assert result.returncode == 2
    assert "Requested more processes (3) than there are available slots (2); lower -np" in result.stderr


# -- how it ends ---------------------------------------------------------------------------------------


@contextmanager
def waiting(directory: Path, *before: str) -> Iterator[tuple[subprocess.Popen[str], list[int], set[int]]]:
    """Start ranks that wait, on two hosts; give emulate, all processes it made, and its networks."""
    with subprocess.Popen(
        [*before, *FARANDOLE, "emulate", "--rate", "50mbit", "--", sys.executable, script(directory, WAITS)],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 20
            while len(ups := list(directory.glob("up.*"))) < 2:
                assert time.monotonic() < deadline, "the ranks did not start"
                time.sleep(0.02)
            words = [int(word) for up in ups for word in up.read_text().split()]
            made = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            assert {words[0], words[1], words[3], words[4]} <= set(made)
            networks = {network for pid in made if (network := network_of(pid))} - {network_of(os.getpid())}
            assert {words[2], words[5]} < networks, "the switch has one too"
            yield process, made, networks
        finally:
            process.kill()


def network_of(pid: int) -> int:
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/net").st_ino  # noqa: PTH116 - no path: a door
    return 0


def files_of(process: subprocess.Popen[str]) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"farandole-hosts-{process.pid}-*"))


def check_nothing_is_left(made: list[int], networks: set[int]) -> None:
    assert gone_within(made, 8), [psutil.Process(pid).cmdline() for pid in alive(made)]
    used = {network_of(pid) for pid in psutil.pids()}
    assert not networks & used
    ours = {"bridge", "port0", "port1", "to0", "to1"}
    assert not ours & {name for _, name in socket.if_nameindex()}


@pytest.mark.full("further")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    with waiting(tmp_path) as (process, made, networks):
        assert files_of(process)
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 128 + number, said
        assert "bytes that crossed each link" in said
        check_nothing_is_left(made, networks)
        assert files_of(process) == []


@pytest.mark.full("further")
def test_after_kill_9_nothing_is_left_and_the_next_start_takes_its_files(tmp_path: Path) -> None:
    with waiting(tmp_path) as (process, made, networks):
        process.kill()
        check_nothing_is_left(made, networks)
        # Nobody has reaped it yet: it is dead all the same.
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert files_of(process)
        assert run(tmp_path, "emulate", "--", "true").returncode == 0
        assert files_of(process) == []


@pytest.mark.full("further")
def test_kill_9_of_the_launcher_on_the_first_host_is_its_exit_code(tmp_path: Path) -> None:
    with waiting(tmp_path) as (process, made, networks):
        children = psutil.Process(process.pid).children()
        (launcher,) = [child for child in children if child.cmdline()[2:4] == ["farandole", "run"]]
        launcher.kill()
        process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGKILL
        check_nothing_is_left(made, networks)
        assert files_of(process) == []


@pytest.mark.full("further")
def test_under_nohup_a_hangup_ends_nothing(tmp_path: Path) -> None:
    with waiting(tmp_path, "nohup") as (process, made, networks):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)  # a few turns of its loop
        assert process.poll() is None
        process.terminate()
        process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM
        check_nothing_is_left(made, networks)


# -- without root --------------------------------------------------------------------------------------


@contextmanager
def readable_by_all() -> Iterator[Path]:
    """Give a directory with a copy of the source and a place to work, for any user."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(farandole.__file__).parent, directory / "src" / "farandole", ignore=ignored)
        (directory / "work").mkdir()
        (directory / "work").chmod(0o777)
        yield directory


def as_nobody(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the shell without root: as nobody, or as ourselves when we are somebody else."""
    words = ["su", "nobody", "-s", "/bin/bash", "-c", command] if os.geteuid() == 0 else ["bash", "-c", command]
    return subprocess.run(
        words, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=40, check=False
    )


@pytest.mark.full("further")
def test_without_root_it_works_in_a_user_namespace() -> None:
    possible = as_nobody("unshare --user --map-root-user --net --uts --mount true")
    if possible.returncode:
        pytest.skip(f"no user namespaces without root here: {possible.stderr.strip()}")
    if not Path("/usr/bin/python3").exists():
        pytest.skip("needs /usr/bin/python3, which every user may read")
    with readable_by_all() as directory:
        work = directory / "work"
        text = script(work, TRANSFER)
        command = f"/usr/bin/python3 {text} 0-1 1000000"
        result = as_nobody(
            f"cd {work} && PATH=/usr/bin:/bin PYTHONPATH={directory}/src PYTHONDONTWRITEBYTECODE=1 "
            f"/usr/bin/python3 -m farandole emulate --rate 50mbit --json -- {command}"
        )
        assert result.returncode == 0, result.stderr
        assert 1_000_000 < links(json.loads(result.stdout))["host0 eth0"][0] < 1_050_000
        assert seconds(work, 1) >= LEAST_SHARE * 8e6 / 50e6


def test_a_kernel_that_refuses_is_an_error_of_one_line(tmp_path: Path) -> None:
    forbid = "echo 0 > /proc/sys/user/max_net_namespaces && exec"
    command = shlex.join([*FARANDOLE, "emulate", "--", "true"])
    result = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", f"{forbid} {command}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == (
        "farandole: this machine cannot make host switch: unshare: No space left on device; "
        "network namespaces are needed (root, or user namespaces; not inside most containers)\n"
    )


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.gate_cases("--hosts 0---hosts 0: expected 1 to 200")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--hosts two", "argument --hosts: expected a whole number, got 'two'"),
        ("--hosts 0", "--hosts 0: expected 1 to 200"),
        ("--slots 0.5", "argument --slots: expected a whole number, got '0.5'"),
        ("--slots 65", "--slots 65: expected 1 to 64"),
        ("--rate fast", "--rate 'fast' is not a rate such as 200mbit or 1gbit"),
        ("--rate 1bit", "--rate '1bit' is not a rate between 8kbit and 400gbit"),
        ("--rate", "argument --rate: expected one argument"),
        ("--rate-between 50mbit", "--rate-between '50mbit': expected two hosts and a rate, e.g. 0,1=50mbit"),
        ("--rate-between ²,1=50mbit", "--rate-between '²,1=50mbit': expected two hosts and a rate"),
        ("--rate-between 0,1=x", "--rate-between '0,1=x': 'x' is not a rate"),
        ("--rate-between 0,2=50mbit", "--rate-between 0,2: expected two different hosts of 0 to 1"),
        ("--rate-between 0,1=5mbit --rate-between 1,0=6mbit", "--rate-between '1,0=6mbit': these hosts have"),
        ("--latency soon", "--latency 'soon' is not a duration such as 30s or 5m"),
        ("--latency 1h", "--latency '1h': expected at most 10 s"),
        ("--congestion-control fast", "--congestion-control 'fast': expected one that this kernel has: "),
        ("--script 5s", "--script '5s': expected TIME:RATE"),
        ("--script 5s:2=cut", "--script '5s:2=cut': there is no host '2', only 0 to 1"),
        ("--script 5s:²=cut", "there is no host '²'"),
        ("--jsom", "unknown option --jsom; did you mean '--json'?"),
    ],
)
def test_bad_input_is_an_error_of_one_line(tmp_path: Path, options: str, problem: str) -> None:
    check_refused(run(tmp_path, "emulate", *options.split(), "--", "true"), problem)


@pytest.mark.gate_cases("command3-unknown command 'run'; did you mean: -- farandole run ...")
@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ([], "emulate: no command was given"),
        (["no-such-command"], "command 'no-such-command' was not found"),
        (["python", "no_such.py"], "script no_such.py does not exist"),
        (["run", "train.py"], "unknown command 'run'; did you mean: -- farandole run ..."),
        (["farandole", "emulate", "--", "true"], "emulate inside emulate"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused_before_anything_is_made(
    tmp_path: Path, command: list[str], problem: str
) -> None:
    check_refused(run(tmp_path, "emulate", "--", *command), problem)


def check_refused(result: subprocess.CompletedProcess[str], problem: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert problem in result.stderr
    assert result.stderr.startswith("farandole: ")
    assert result.stderr.count("\n") == 1, result.stderr
