"""`farandole run -H a:2,b:2` over real ssh: places, interfaces, what travels, what is refused, what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.net.cluster import FARANDOLE, Cluster, cluster, why_impossible
from tests.ranks.keras_jobs import FOLDER, MOST_SECONDS, needs_tensorflow
from tests.ranks.test_keras_example import EPOCH
from tests.ranks.test_keras_example import EXAMPLE as KERAS_EXAMPLE
from tests.ranks.test_launch import script
from tests.ranks.test_preempted_jobs import LISTENS, wait_for

pytestmark = [pytest.mark.net, pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")]

TELL = """
import json, os, socket, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "FARANDOLE_NODE_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME",
         "NCCL_SOCKET_IFNAME", "SECRET_OF_MINE", "NOT_ASKED_FOR", "OMP_PROC_BIND", "HOROVOD_HOSTNAME"]
print(json.dumps({"host": socket.gethostname(), "directory": os.getcwd(), "python": sys.executable,
                  **{name: os.environ.get(name) for name in names}}))
"""

TRAIN = """
import torch, farandole as fd
world = fd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(5):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(world.rank))).pow(2).mean().backward()
    optimizer.step()
print("weights", [round(float(x), 6) for x in model.weight.flatten()])
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("ssh"), 3) as made:
        yield made


def lines_of(result: subprocess.CompletedProcess[str]) -> dict[int, dict[str, str]]:
    """Return what each rank printed as JSON."""
    assert result.returncode == 0, result.stderr
    found = (line.split("] ", 1) for line in result.stdout.splitlines() if line.startswith("["))
    return {int(rank[1:]): json.loads(text) for rank, text in found}


def run_on_two(hosts: Cluster, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run `TELL` in `directory`, one rank on each of the first two hosts."""
    ranks = ("-H", "host0:1,host1:1", *hosts.options)
    return hosts.run("run", *ranks, "--", sys.executable, script(directory, TELL), cwd=directory)


@pytest.mark.full("further")
def test_ranks_run_where_they_should_and_meet_over_the_network(hosts: Cluster, tmp_path: Path) -> None:
    environment = {"SECRET_OF_MINE": "do $(not) 'print' me", "NOT_ASKED_FOR": "1", "OMP_PROC_BIND": "true"}
    result = hosts.run(
        "run", "-np", "5", "-H", "host1:2,host0:2,host2:2", "-x", "SECRET_OF_MINE", *hosts.options, "--",
        sys.executable, script(tmp_path, TELL), cwd=tmp_path, environment=environment,
    )  # fmt: skip
    told = lines_of(result)
    assert [told[rank]["host"] for rank in range(5)] == ["host1", "host1", "host0", "host0", "host2"]
    for rank, values in told.items():
        assert values["directory"] == str(tmp_path)
        assert values["python"] == sys.executable
        # Rank 0's host, as the others reach it: not what its name means to itself, and not the loopback.
        assert values["MASTER_ADDR"] == hosts.network.hosts[1].address
        assert values["GLOO_SOCKET_IFNAME"] == values["NCCL_SOCKET_IFNAME"] == "eth0"
        assert values["FARANDOLE_NODE_RANK"] == str([0, 0, 1, 1, 2][rank])
        assert values["SECRET_OF_MINE"] == environment["SECRET_OF_MINE"]
        assert values["OMP_PROC_BIND"] == "true", "on the list of what is forwarded"
        if values["host"] != "host0":
            assert values["NOT_ASKED_FOR"] is None
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "logs" / "rank_4.log").read_text())["host"] == "host2"
    assert json.loads((run / "run.json").read_text())["hosts"] == ["host1", "host0", "host2"]
    assert not (run / ".token").exists()


@pytest.mark.full("slow")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_a_warning_reaches_ranks_that_listen_on_other_hosts(
    hosts: Cluster, tmp_path: Path, number: int, code: int
) -> None:
    words = ["run", "-H", "host0:1,host1:1", *hosts.options, "--", sys.executable, script(tmp_path, LISTENS), "4"]
    with hosts.popen([*FARANDOLE, *words], cwd=tmp_path) as process:
        wait_for(tmp_path, process, "pids.*", 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert out.count(f"saved, told {int(number)} and the child lives") == 2, (out, err)
    assert process.returncode == code


@pytest.mark.full("further")
def test_bridges_are_not_taken_for_the_network(hosts: Cluster, tmp_path: Path) -> None:
    """Both hosts have a docker0 with one and the same address, as two machines with containers have."""
    enter = [["nsenter", f"--net=/proc/{host.keeper}/ns/net"] for host in hosts.network.hosts[:2]]
    for door in enter:
        batch = "link add docker0 type bridge\naddress add 172.17.0.1/16 dev docker0\nlink set docker0 up\n"
        subprocess.run([*door, "ip", "-batch", "-"], input=batch, text=True, check=True)
    try:
        result = run_on_two(hosts, tmp_path)
    finally:
        for door in enter:
            subprocess.run([*door, "ip", "link", "delete", "docker0"], check=True)
    assert {values["GLOO_SOCKET_IFNAME"] for values in lines_of(result).values()} == {"eth0"}
    assert {values["MASTER_ADDR"] for values in lines_of(result).values()} == {hosts.network.hosts[0].address}


@pytest.mark.full("slow")
def test_training_on_a_host_with_a_file_system_of_its_own(hosts: Cluster, tmp_path: Path) -> None:
    """host1 has another disk in the place of ours: events, crashes and whatever a rank left are sent back."""
    shared = tmp_path / "runs"
    shared.mkdir()
    door = f"--mount=/proc/{hosts.network.hosts[1].keeper}/ns/mnt"
    subprocess.run(["nsenter", door, "mount", "-t", "tmpfs", "none", str(shared)], check=True)
    text = TRAIN + (
        "import os\n"
        "open(f\"{os.environ['FARANDOLE_RUN_DIR']}/mine-{world.rank}\", 'w').write('x' * 600_000)\n"
        "if world.rank == 1: raise KeyError('over there')\nimport time; time.sleep(30)\n"
    )
    try:
        result = hosts.run(
            "run", "-H", "host0:1,host1:1", *hosts.options, "--", sys.executable, script(tmp_path, text),
            cwd=tmp_path, seconds=50,
        )  # fmt: skip
    finally:
        subprocess.run(["nsenter", door, "umount", "-l", str(shared)], check=True)
    assert result.returncode == 1
    weights = [line.split("weights")[1] for line in result.stdout.splitlines() if "weights" in line]
    assert len(weights) == 2, result.stderr
    assert len(set(weights)) == 1, "the ranks agree"
    assert "farandole: rank 1 on host1 failed after step 5: KeyError: 'over there'" in result.stderr
    (run,) = shared.iterdir()
    assert [(run / f"mine-{rank}").stat().st_size for rank in (0, 1)] == [600_000, 600_000]
    assert (run / "mine-1").stat().st_mode & 0o777 == 0o600
    assert all((run / f"events-rank{rank}.jsonl").stat().st_size for rank in (0, 1))
    assert json.loads((run / "crashes" / "rank_1.json").read_text())["message"] == "'over there'"
    assert not list(Path("/tmp").glob("farandole-run-*"))


@pytest.mark.full("further")
def test_nothing_secret_is_in_any_list_of_processes(hosts: Cluster, tmp_path: Path) -> None:
    secret = "hunter2-of-the-test"
    seen: set[str] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.01):
            for process in psutil.process_iter(["cmdline"]):
                seen.update(process.info["cmdline"] or [])

    watcher = threading.Thread(target=look)
    command = [sys.executable, "-m", "farandole", "run", "-H", "host0:1,host1:1", "-x", "A_TOKEN", *hosts.options]
    text = f"import os, time; assert os.environ['A_TOKEN'] == {secret!r}; time.sleep(0.3)"
    words = [*command, "--", sys.executable, script(tmp_path, text)]
    process = hosts.popen(words, cwd=tmp_path, environment={"A_TOKEN": secret})
    watcher.start()
    _, err = process.communicate(timeout=30)
    stop.set()
    watcher.join()
    assert process.returncode == 0, err
    assert any("exec /bin/sh -c" in word for word in seen), "the remote command was seen"
    assert not [word for word in seen if secret in word]
    logs = [path.read_text(errors="replace") for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not [text for text in logs if secret in text]


REFUSED = {
    "unknown host": (["-H", "no-such-host:1"], 2, "host no-such-host failed: its name is not known here"),
    "nobody there": (["-H", "host1:1", "-p", "2223"], 2, "host host1 failed: no ssh server answers there"),
    "wrong key": (["-H", "host1:1", "-i", "KEYS/host2_key"], 2, "host host1 failed: it refused our key"),
    "no python": (["-H", "host1:1", "--python", "/no/python3"], 2, "host host1 failed: it has no /no/python3"),
    "no directory": (["-H", "host1:1", "--chdir", "/no"], 2, "host host1 failed: there is no directory /no"),
    "bad prelude": (["-H", "host1:1", "--prelude", "false"], 2, "host host1 failed: the prelude failed"),
    "bad option": (["-H", "host1:1", "--ssh-option", "Nonsense=yes"], 2, "host host1 failed: ssh does not accept"),
    "no command": (["-H", "host1:1", "--chdir", "/"], 2, "rank 0 on host1 failed"),
}  # fmt: skip


@pytest.mark.gate_cases("bad option")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(hosts: Cluster, tmp_path: Path, name: str) -> None:
    words, code, says = REFUSED[name]
    words = [word.replace("KEYS", str(hosts.directory)) for word in words]
    begin = time.monotonic()
    # What comes first counts for ssh's options, and last for ours.
    result = hosts.run(
        "run", *hosts.options, *words, "--", sys.executable, os.path.relpath(script(tmp_path, TELL), tmp_path),
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    assert f"farandole: {says}" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert time.monotonic() - begin < 9, "nobody waited for a time-out, the shortest of which is 10 s"


@pytest.mark.parametrize("known", ["nothing", "another key"])
def test_a_host_key_that_is_not_known_or_has_changed(hosts: Cluster, tmp_path: Path, known: str) -> None:
    file = tmp_path / "known_hosts"
    text = (hosts.directory / "known_hosts").read_text()
    other = (hosts.directory / "host2_key.pub").read_text().split()[1]
    file.write_text("" if known == "nothing" else f"[host1]:2222 ssh-ed25519 {other}\n")
    assert other in text
    result = hosts.run(
        "run", "-H", "host1:1", "--ssh-option", f"UserKnownHostsFile={file}", *hosts.options, "--",
        sys.executable, script(tmp_path, TELL), cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 2
    says = "its host key is not known" if known == "nothing" else "its host key has changed"
    assert f"farandole: host host1 failed: {says}" in result.stderr


@pytest.mark.full("further")
def test_another_version_is_refused(hosts: Cluster, tmp_path: Path) -> None:
    """One host has another farandole in the place of ours."""
    import farandole

    source = Path(farandole.__file__).parent
    other = tmp_path / "version.py"
    other.write_text('VERSION = "0.0.1"\n')
    door = f"--mount=/proc/{hosts.network.hosts[1].keeper}/ns/mnt"
    subprocess.run(["nsenter", door, "mount", "--bind", str(other), str(source / "version.py")], check=True)
    try:
        result = run_on_two(hosts, tmp_path)
    finally:
        subprocess.run(["nsenter", door, "umount", str(source / "version.py")], check=True)
    assert result.returncode == 2, result.stderr
    assert "farandole: host host1 failed: it has farandole 0.0.1, this host has " in result.stderr
    assert "-m pip install -e COPY" in result.stderr


@pytest.mark.full("further")
def test_another_commit_of_the_working_directory_is_told(hosts: Cluster, tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        script(tmp_path / name, "print('ran')")
        git = ["git", "-C", str(tmp_path / name), "-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", name], check=True)
    result = hosts.run(
        "run", "-H", "host1:1", "--chdir", str(tmp_path / "there"), *hosts.options, "--",
        sys.executable, "-S", "script.py", cwd=tmp_path / "here",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "farandole: warning: host host1: the commit of the working directory is " in result.stderr
    assert result.stdout == "[0] ran\n"


@pytest.mark.full("slow")
def test_ten_starts_leave_nothing(hosts: Cluster, tmp_path: Path) -> None:
    """No process, no socket, no file but the runs."""
    quick = script(tmp_path, "print('here')")

    def start() -> None:
        words = ["run", "-H", "host0:1,host1:1", *hosts.options, "--", sys.executable, "-S", quick]
        result = hosts.run(*words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("here") == 2

    start()
    before = state(hosts, tmp_path)
    for _ in range(10):
        start()
    deadline = time.monotonic() + 3
    while state(hosts, tmp_path) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state(hosts, tmp_path) == before


def state(hosts: Cluster, directory: Path) -> list[object]:
    """Return what a start in `directory` may leave behind: children of the servers, files, agents."""
    children = [
        each.name() for server in hosts.servers for each in psutil.Process(server.pid).children(recursive=True)
    ]
    files = sorted(path.name for place in ("/dev/shm", "/tmp") for path in Path(place).glob("farandole-run*"))
    agents = [
        each.pid
        for each in psutil.process_iter(["cmdline", "cwd"])
        if (each.info["cmdline"] or [])[1:3] == ["-I", "-S"] and each.info["cwd"] == str(directory)
    ]
    return [children, files, agents]


@pytest.mark.full("further")
def test_a_host_with_too_few_cores_says_so_before_its_ranks_start(hosts: Cluster, tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    ranks = ("-H", f"host0:{cores + 1},host1:1", *hosts.options)
    text = script(tmp_path, "import os; print(os.sched_getaffinity(0))")
    result = hosts.run("run", *ranks, "--", sys.executable, text, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    word = f"{cores} core{'s' * (cores > 1)}"
    assert warnings == [
        f"farandole: host host0: warning: {cores + 1} ranks on {word}: they share cores, none is bound, and a "
        f"step takes the longer; give this host at most {cores} slots"
    ]


def test_more_threads_than_cores_of_a_rank_are_said_for_each_host(hosts: Cluster, tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    ranks = ("-H", "host0:1,host1:1", *hosts.options)
    words = ("run", *ranks, "--", sys.executable, script(tmp_path, "pass"))
    result = hosts.run(*words, cwd=tmp_path, environment={"OMP_NUM_THREADS": str(cores + 1)})
    assert result.returncode == 0, result.stderr
    warnings = sorted(line for line in result.stderr.splitlines() if "warning" in line)
    assert [line.split(" and each rank")[0] for line in warnings] == [
        f"farandole: host host{index}: warning: OMP_NUM_THREADS={cores + 1}," for index in range(2)
    ]


@pytest.mark.full("slow")
@needs_tensorflow
@pytest.mark.timeout(2 * MOST_SECONDS)
def test_the_walkthroughs_keras_script_trains_on_hosts_as_in_one_process(hosts: Cluster, tmp_path: Path) -> None:
    words = [str(KERAS_EXAMPLE), "--train-dir", "images/train", "--val-dir", "images/val", "--generate", "96"]
    words += ["--model", "tiny", "--image-size", "20", "--classes", "3", "--wd", "0", "--epochs", "1"]
    words += ["--warmup-epochs", "0", "--checkpoint-format", "weights-{epoch}.keras"]
    variables = {
        "KERAS_BACKEND": "tensorflow", "TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    with hosts.popen(
        [sys.executable, *words, "--batch-size", "24", "--base-lr", "0.2"], cwd=alone, environment=variables
    ) as one:
        ranks = ("-H", "host0:1,host1:1", *hosts.options, "--", sys.executable, *words)
        two = hosts.run(
            "run", *ranks, "--batch-size", "12", "--base-lr", "0.1", cwd=together, seconds=MOST_SECONDS,
            environment=variables,
        )  # fmt: skip
        said, _ = one.communicate(timeout=MOST_SECONDS)
    assert two.returncode == 0, two.stderr
    mine, theirs = EPOCH.findall(two.stdout), EPOCH.findall(said)
    assert len(mine) == len(theirs) == 1, two.stdout + said
    for a, b in zip(mine[0], theirs[0], strict=True):
        assert float(a) == pytest.approx(float(b), abs=2e-4), "the losses and accuracies of the epoch"
    assert (together / "weights-1.keras").is_file()
