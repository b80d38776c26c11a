"""horovodrun's ways with real processes: the line without ``--``, unequal hosts, the shim, `horovod.run`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from farandole.core.vocabulary.errors import ConfigError
from farandole.horovod import run as horovod_run
from farandole.horovod.as_horovod import SHIM, find_real_horovod
from tests import warm

FARANDOLE = [sys.executable, "-m", "farandole"]


def run(
    directory: Path, *words: str, path: Path | None = None, timeout: float = 40
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        words, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False, env=environment
    )


def script(directory: Path, text: str) -> str:
    (directory / "train.py").write_text(text)
    return str(directory / "train.py")


PLACE = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"]
print(json.dumps([*(os.environ["HOROVOD_" + name] for name in names), sys.argv[1:]]))
print("to stderr", file=sys.stderr)
"""


@pytest.mark.full("further")
def test_a_line_of_horovodrun_on_hosts_of_unequal_slots(tmp_path: Path) -> None:
    result = run(
        tmp_path, *FARANDOLE, "run", "-np", "3", "-H", "localhost:1,127.0.0.1:2", "--cycle-time-ms", "2",
        "--output-filename", "kept", "--output-prefix", "horovod", "python", script(tmp_path, PLACE), "-np", "9",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    told = {line[:12]: json.loads(line[12:]) for line in result.stdout.splitlines()}
    assert told == {
        "[0]<stdout>:": ["0", "0", "1", "0", "2", "localhost", ["-np", "9"]],
        "[1]<stdout>:": ["1", "0", "2", "1", "2", "127.0.0.1", ["-np", "9"]],
        "[2]<stdout>:": ["2", "1", "2", "0", "1", "127.0.0.1", ["-np", "9"]],
    }
    assert "[2]<stderr>:to stderr" in result.stderr.splitlines()
    assert "--cycle-time-ms has no effect" in result.stderr
    assert (tmp_path / "kept" / "rank.2" / "stdout").read_text() == result.stdout.splitlines()[-1][12:] + "\n" or (
        json.loads((tmp_path / "kept" / "rank.2" / "stdout").read_text())[0] == "2"
    )
    assert (tmp_path / "kept" / "rank.0" / "stderr").read_text() == "to stderr\n"


WORLD = """
import farandole as fd, torch
world = fd.init(progress=False)
total = torch.full((1000,), float(world.rank + 1))
torch.distributed.all_reduce(total)
print(world.rank, world.local_rank, world.node_rank, world.node_count, total[0].item())
"""


@pytest.mark.full("further")
def test_a_world_of_two_hosts_on_one_machine(tmp_path: Path) -> None:
    result = warm.run(tmp_path, "run", "-H", "localhost:1,127.0.0.1:1", script(tmp_path, WORLD))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] 0 0 0 2 3.0", "[1] 1 0 1 2 3.0"]


SHIMMED = """
import importlib, importlib.util, os, pickle, shutil, subprocess
import horovod
import horovod.torch as hvd
import horovod.torch.mpi_ops, horovod.torch.compression, horovod.torch.functions
import horovod.common.basics, horovod.common.exceptions, horovod.common.process_sets, horovod.common.util
import horovod.data, horovod.runner, horovod.common.elastic, horovod.torch.optimizer, horovod.torch.sync_batch_norm
import horovod.torch.elastic, horovod.torch.elastic.sampler, horovod.torch.elastic.state
from horovod.common.exceptions import HorovodInternalError
import farandole.horovod.torch, farandole.horovod.common.exceptions, farandole.horovod.common.process_sets
import torch

assert horovod.__version__ == "0.28.1" and callable(horovod.run)
assert hvd is farandole.horovod.torch and hvd.__spec__.name == "farandole.horovod.torch"
assert hvd.mpi_ops is importlib.import_module("farandole.horovod.torch.mpi_ops")
assert HorovodInternalError is farandole.horovod.common.exceptions.HorovodInternalError
assert hvd.ProcessSet is farandole.horovod.common.process_sets.ProcessSet
assert hvd.elastic.state is importlib.import_module("farandole.horovod.torch.elastic.state")
assert isinstance(pickle.loads(pickle.dumps(HorovodInternalError("x"))), HorovodInternalError)
for absent in ("mxnet", "ray", "spark"):
    try:
        importlib.import_module("horovod." + absent)
    except ImportError as error:
        assert f"horovod.{absent}: " in str(error) and "farandole has no front end for" in str(error), error
    else:
        raise AssertionError(absent)
assert importlib.util.find_spec("horovod.nonsense") is None
for absent in ("gloo_run", "util.threads", "common.util.secret", "elastic.driver", "http.http_server"):
    try:
        importlib.import_module("horovod.runner." + absent)
    except ImportError as error:
        assert "jobs are started by farandole's launcher, which has no such part" in str(error), error
    else:
        raise AssertionError(absent)
hvd.init()
assert (os.environ["HOROVOD_CONTROLLER"], os.environ["HOROVOD_SIZE"]) == ("gloo", str(hvd.size()))
print(f"{hvd.rank()} {hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()}")  # in one write
if hvd.rank() == 0:
    print(subprocess.run(["horovodrun", "--check-build"], capture_output=True, text=True).stdout.splitlines()[0])
hvd.shutdown()
"""


def test_an_unchanged_script_finds_our_front_end(tmp_path: Path) -> None:
    result = warm.run(tmp_path, "run", "-np", "2", "--as-horovod", "--", "python", script(tmp_path, SHIMMED))
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert [lines[0], lines[2]] == ["[0] 0 3.0", "[1] 1 3.0"]
    assert lines[1].startswith("[0] Farandole v")


@pytest.mark.full("further")
def test_without_asking_nobody_finds_it(tmp_path: Path) -> None:
    text = (
        "import importlib.util, shutil;"
        "print(importlib.util.find_spec('horovod'), 'shim' in str(shutil.which('horovodrun')))"
    )
    result = run(tmp_path, *FARANDOLE, "run", "-np", "1", "--", script(tmp_path, text))
    assert result.stdout == "[0] None False\n", result.stderr


def install(place: Path, *, with_metadata: bool = True, with_module: bool = True) -> Path:
    """Leave what an installed Horovod leaves in a folder of packages."""
    place.mkdir()
    if with_metadata:
        (place / "horovod-0.27.0.dist-info").mkdir()
        (place / "horovod-0.27.0.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.27.0\n")
    if with_module:
        (place / "horovod").mkdir()
        (place / "horovod" / "__init__.py").write_text("")
    return place


@pytest.mark.full("further")
def test_it_is_refused_beside_an_installed_horovod(tmp_path: Path) -> None:
    place = install(tmp_path / "site")
    result = run(tmp_path, *FARANDOLE, "run", "-np", "1", "--as-horovod", script(tmp_path, "print(1)"), path=place)
    assert result.returncode == 2
    assert result.stdout == ""
    assert f"horovod 0.27.0 in {place} is installed beside farandole" in result.stderr
    assert "pip uninstall horovod" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_another_horovod_is_found_by_its_package_or_its_metadata_alone(tmp_path: Path) -> None:
    assert find_real_horovod([str(SHIM)]) == ""
    module = install(tmp_path / "module", with_metadata=False)
    assert (
        find_real_horovod([str(SHIM), str(module)]) == f"a package horovod in {module / 'horovod' / '__init__.py'}"
    )
    metadata = install(tmp_path / "metadata", with_module=False)
    assert find_real_horovod([str(metadata)]) == f"horovod 0.27.0 in {metadata}"
    (tmp_path / "horovod").mkdir()  # a folder that happens to have the name is no package
    assert find_real_horovod([str(tmp_path)]) == ""


@pytest.mark.full("further")
def test_a_rank_whose_own_python_has_horovod_says_so(tmp_path: Path) -> None:
    place = install(tmp_path / "site")
    text = f"import sys; sys.path.append({str(place)!r}); import horovod"
    result = run(tmp_path, *FARANDOLE, "run", "-np", "1", "--as-horovod", "--", script(tmp_path, text))
    assert result.returncode == 1
    assert f"but horovod 0.27.0 in {place} is there too" in result.stderr


@pytest.mark.full("further")
def test_the_runner_is_horovodrun(tmp_path: Path) -> None:
    result = run(
        tmp_path, sys.executable, "-m", "farandole.horovod.runner", "-np", "2", "-H", "localhost:2",
        "python", "-c", "import horovod, os; print(horovod.__version__, os.environ['HOROVOD_RANK'])",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:0.28.1 0", "[1]<stdout>:0.28.1 1"]
    assert os.access(SHIM / "bin" / "horovodrun", os.X_OK)


@pytest.mark.full("further")
def test_an_elastic_line_starts_workers_on_the_hosts_that_a_script_finds(tmp_path: Path) -> None:
    discover = tmp_path / "discover.sh"
    discover.write_text("#!/bin/sh\necho localhost:2\n")
    discover.chmod(0o755)
    text = "import os; print(os.environ['HOROVOD_ELASTIC'], os.environ['HOROVOD_CYCLE_TIME'])"
    words = ["run", "-np", "2", "--min-np", "1", "--host-discovery-script", str(discover), "--cycle-time-ms", "2"]
    result = run(tmp_path, *FARANDOLE, *words, "--output-filename", "kept", script(tmp_path, text))
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.splitlines()) <= {"[0] 1 2.0", "[1] 1 2.0"}
    assert "1 2.0\n" in {file.read_text() for file in tmp_path.glob("kept/rank.*/stdout")}


@pytest.mark.full("further")
@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh (apt-get install openssh-client)")
def test_a_host_of_an_elastic_line_that_nobody_knows_is_named(tmp_path: Path) -> None:
    script(tmp_path, "print('here')")
    far = run(tmp_path, *FARANDOLE, "run", "--min-np", "1", "-H", "localhost:1,far.invalid:1", "train.py")
    assert far.returncode == 2
    assert "far.invalid" in far.stderr
    assert "its name is not known here" in far.stderr


# -- horovod.run ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _folders_are_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def scaled_rank(factor: int, *, plus: int = 0) -> dict[str, Any]:
    print("rank", os.environ["HOROVOD_RANK"])
    return {"value": int(os.environ["HOROVOD_RANK"]) * factor + plus, "pid": os.getpid()}


@pytest.mark.full("further")
def test_a_function_runs_on_all_ranks_and_returns_by_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = horovod_run(scaled_rank, (10,), {"plus": 1}, num_proc=2)
    assert [result["value"] for result in results] == [1, 11]
    assert os.getpid() not in {result["pid"] for result in results}
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] rank 0", "[1] rank 1"]
    offset = 5
    assert horovod_run(lambda: offset, hosts="localhost:2", num_proc=2, use_gloo=True) == [5, 5]
    assert list(tmp_path.iterdir()) == []


def place_before_init() -> list[str]:
    """What a script may choose its GPU by, before it meets anybody: this one never does."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    return [os.environ[f"HOROVOD_{name}"] for name in names]


@pytest.mark.full("further")
def test_workers_of_an_elastic_job_know_their_place_before_init(tmp_path: Path) -> None:
    file = tmp_path / "hosts.sh"
    file.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    file.chmod(0o755)
    hosts = str(file)
    found = horovod_run(place_before_init, min_num_proc=2, max_num_proc=2, host_discovery_script=hosts)
    assert found == [["0", "2", "0", "1", "0", "2", "localhost"], ["1", "2", "0", "1", "1", "2", "127.0.0.1"]]
    with pytest.raises(ValueError, match="host_discovery_script excludes hosts and hostfile"):
        horovod_run(place_before_init, host_discovery_script=hosts, hosts="localhost:1")


@pytest.mark.full("slow")
def test_a_function_uses_the_front_end() -> None:
    def add() -> list[float]:
        import torch

        import farandole.horovod.torch as hvd

        hvd.init()
        total: list[float] = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).tolist()
        hvd.shutdown()
        return total

    assert horovod_run(add, num_proc=2) == [[3.0], [3.0]]


def fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one has had enough")
    time.sleep(30)


@pytest.mark.full("further")
def test_a_function_that_fails_names_its_rank_and_its_reason(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        horovod_run(fail_on_one, num_proc=2)
    said = str(caught.value)
    assert said.startswith(
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        "terminated. The first process to do so was:\nProcess name: 1\nExit code: 1\n"
    )
    assert "ValueError: rank one has had enough" in said
    assert "in fail_on_one" in said
    assert time.monotonic() - begin < 20, "the sleeping rank was stopped"
    assert len(list(tmp_path.glob("farandole-run-*/run/logs/rank_1.log"))) == 1
    assert not list(tmp_path.glob("farandole-run-*/*.pkl"))


@pytest.mark.full("further")
def test_a_result_that_cannot_travel_and_a_rank_that_leaves_none() -> None:
    with pytest.raises(RuntimeError, match="Process name: 0\nExit code: 1\nTypeError: cannot pickle"):
        horovod_run(sys._getframe, num_proc=1)
    with pytest.raises(
        RuntimeError, match=r"rank 0 ended well but left no result; did the function call os\._exit"
    ):
        horovod_run(lambda: os._exit(0), num_proc=1)


@pytest.mark.full("further")
def test_arguments_that_exclude_each_other_and_older_names() -> None:
    with pytest.raises(ValueError, match=r"Argument hosts and hostfile only allow one provided."):
        horovod_run(print, hosts="a:1", hostfile="f")
    with pytest.raises(ValueError, match=r"Argument use_gloo and use_mpi only allow one set True."):
        horovod_run(print, use_gloo=True, use_mpi=True)
    with pytest.raises(ConfigError, match=r"MPI support has not been built."):
        horovod_run(print, use_mpi=True)
    with pytest.raises(ConfigError, match=r"Requested more processes \(3\) than there are available slots \(2\)"):
        horovod_run(print, num_proc=3, hosts="localhost:2")
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc instead"):
        assert horovod_run(lambda: 7, np=2) == [7, 7]


def test_without_cloudpickle_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"needs cloudpickle .*pip install -e \S+\[horovod\]"):
        horovod_run(print)


INTERRUPTED = """
from farandole.horovod import run
def sleep():
    import os, time
    open(f"pid.{os.environ['RANK']}", "w").write(str(os.getpid()))
    time.sleep(600)
if __name__ == "__main__":
    run(sleep, num_proc=2)
"""


@pytest.mark.full("further")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whoever_ends_the_caller_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    caller = subprocess.Popen(
        [sys.executable, script(tmp_path, INTERRUPTED)], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while len(files := [f for f in tmp_path.glob("pid.*") if f.read_text()]) < 2:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    ranks = [psutil.Process(int(file.read_text())) for file in files]
    caller.send_signal(number)
    caller.communicate(timeout=20)
    assert caller.returncode == -number
    assert not psutil.wait_procs(ranks, timeout=10)[1]
