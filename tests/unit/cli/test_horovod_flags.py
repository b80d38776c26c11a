"""The flags of horovodrun: what each becomes, in which order sources count, and every refusal's words."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.cli import main as cli_main
from farandole.cli.commands import run as run_command
from farandole.cli.commands.run import check_build
from farandole.cli.options.horovod_flags import FLAGS
from farandole.cli.options.horovod_settings import HorovodSettings, read_settings
from farandole.cli.options.host_options import read_elastic_options, read_host_list, read_ssh_options
from farandole.core.job_plan import read_plan
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from farandole.launch.elastic.options import ElasticOptions
from farandole.launch.job.hosts import HostSlots


def parse(*words: str) -> argparse.Namespace:
    return run_command.make_parser().parse_args([*words, "python", "train.py"])


def settings(*words: str) -> HorovodSettings:
    return read_settings(parse(*words))


MANY = {
    "--fusion-threshold-mb 32": {"HOROVOD_FUSION_THRESHOLD": "33554432"},
    "--cycle-time-ms 2.5": {"HOROVOD_CYCLE_TIME": "2.5"},
    "--cache-capacity 7": {"HOROVOD_CACHE_CAPACITY": "7"},
    "--hierarchical-allreduce": {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"},
    "--no-hierarchical-allreduce": {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"},
    "--hierarchical-allgather": {"HOROVOD_HIERARCHICAL_ALLGATHER": "1"},
    "--torus-allreduce": {"HOROVOD_TORUS_ALLREDUCE": "1"},
    "--autotune": {"HOROVOD_AUTOTUNE": "1"},
    "--no-autotune": {"HOROVOD_AUTOTUNE": "0"},
    "--autotune-log-file a.csv": {"HOROVOD_AUTOTUNE_LOG": "a.csv"},
    "--autotune-warmup-samples 1": {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1"},
    "--autotune-steps-per-sample 2": {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2"},
    "--autotune-bayes-opt-max-samples 3": {"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "3"},
    "--autotune-gaussian-process-noise 0.5": {"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5"},
    "--timeline-filename t.json": {"HOROVOD_TIMELINE": "t.json"},
    "--timeline-mark-cycles": {"HOROVOD_TIMELINE_MARK_CYCLES": "1"},
    "--no-timeline-mark-cycles": {"HOROVOD_TIMELINE_MARK_CYCLES": "0"},
    "--no-stall-check": {"HOROVOD_STALL_CHECK_DISABLE": "1"},
    "--stall-check": {"HOROVOD_STALL_CHECK_DISABLE": "0"},
    "--stall-check-warning-time-seconds 5": {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"},
    "--stall-check-shutdown-time-seconds 90": {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"},
    "--mpi-threads-disable": {"HOROVOD_MPI_THREADS_DISABLE": "1"},
    "--mpi-args=-x": {},
    "--mpi-launch-flag A=1 --mpi-launch-flag=-x": {"A": "1"},
    "--tcp": {"NCCL_IB_DISABLE": "1"},
    "--binding-args=-bind": {},
    "--num-nccl-streams 2": {"HOROVOD_NUM_NCCL_STREAMS": "2"},
    "--thread-affinity 3": {"HOROVOD_THREAD_AFFINITY": "3"},
    "--gloo-timeout-seconds 9": {"HOROVOD_GLOO_TIMEOUT_SECONDS": "9"},
    "--log-level DEBUG": {"HOROVOD_LOG_LEVEL": "DEBUG"},
    "--log-with-timestamp": {"HOROVOD_LOG_HIDE_TIME": "0"},
    "--log-without-timestamp": {"HOROVOD_LOG_HIDE_TIME": "1"},
    "--log-hide-timestamp": {"HOROVOD_LOG_HIDE_TIME": "1"},
    "--no-log-hide-timestamp": {"HOROVOD_LOG_HIDE_TIME": "0"},
    "--start-timeout 20": {"HOROVOD_START_TIMEOUT": "20"},
    "--disable-cache": {},
    "--network-interfaces lo": {
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo",
    },
    "--network-interface lo --network-interface lo": {
        "GLOO_SOCKET_IFNAME": "lo,lo", "NCCL_SOCKET_IFNAME": "lo,lo", "HOROVOD_GLOO_IFACE": "lo",
    },
    "--gloo": {},
}  # fmt: skip


@pytest.mark.parametrize("words", MANY)
def test_what_a_flag_tells_the_ranks(words: str) -> None:
    assert settings(*words.split()).environment == MANY[words]


RANK = """
import dataclasses, json, os
from farandole.core.job_plan import read_horovod_variables
from farandole.core.job_plan import plan_with_requests
read = read_horovod_variables()
print(json.dumps([dict(os.environ), dataclasses.asdict(read), plan_with_requests(read.plan).plan.to_mapping()]))
"""


def test_flags_reach_the_rank_and_mean_there_what_they_mean_here(tmp_path: Path) -> None:
    """A real job of one rank that asks for its settings as every front end does."""
    (tmp_path / "train.py").write_text(RANK)
    chosen = [
        "--fusion-threshold-mb 32", "--cycle-time-ms 2.5", "--cache-capacity 7", "--hierarchical-allreduce",
        "--autotune", "--timeline-filename t.json", "--timeline-mark-cycles",
        "--stall-check-warning-time-seconds 5", "--stall-check-shutdown-time-seconds 90",
        "--gloo-timeout-seconds 9", "--log-level DEBUG", "--num-nccl-streams 2", "--network-interfaces lo",
    ]  # fmt: skip
    words = [word for flag in chosen for word in flag.split()]
    job = ["run", "-np", "1", "--quiet", *words, sys.executable, "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "farandole", *job],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    environment, read, plan = json.loads(done.stdout.removeprefix("[0] "))
    for flag in chosen:
        assert MANY[flag].items() <= environment.items(), flag
    assert (read["fusion_bytes"], read["cache_capacity"], read["timeout_seconds"]) == (32 << 20, 7, 9.0)
    assert (read["stall_warning_seconds"], read["stall_shutdown_seconds"]) == (5.0, 90.0)
    assert (read["timeline"], read["timeline_mark_cycles"]) == ("t.json", True)
    assert (plan["bucket_bytes"], plan["route"], plan["codec"]) == (32 << 20, "hierarchical", "auto")
    assert plan["timeout_seconds"] == 90.0


def test_every_flag_of_the_table_is_tried_above() -> None:
    tried = {word.partition("=")[0] for words in MANY for word in words.split()}
    assert {flag.spelling for flag in FLAGS} <= tried


def test_nothing_typed_is_nothing_said() -> None:
    assert settings() == HorovodSettings()


def planned(*words: str) -> Plan:
    """Return the plan that flags alone give."""
    plan = read_plan(None, (), settings(*words).plan)
    assert plan is not None
    return plan


def test_flags_that_change_a_run_change_the_plan() -> None:
    words = (
        "--hierarchical-allreduce", "--autotune", "--fusion-threshold-mb", "2",
        "--stall-check-shutdown-time-seconds", "70",
    )  # fmt: skip
    plan = planned(*words)
    assert (plan.route, plan.codec, plan.lossy) == ("hierarchical", "auto", False)
    assert (plan.bucket_bytes, plan.timeout_seconds) == (2 * 2**20, 70.0)
    assert planned("--torus-allreduce").route == "hierarchical"
    assert planned("--fusion-threshold-mb", "0").bucket_bytes == 1
    for off in ("--no-autotune", "--no-hierarchical-allreduce", "--stall-check-shutdown-time-seconds 0"):
        assert read_plan(None, (), settings(*off.split()).plan) is None


def test_a_typed_flag_goes_before_the_plan_file_but_not_against_another_argument(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('route = "flat"\naccumulate = 3\n')
    wishes = settings("--hierarchical-allreduce").plan
    read = read_plan(str(plan), (), wishes)
    assert read is not None
    assert (read.route, read.accumulate) == ("hierarchical", 3)
    with pytest.raises(ConfigError) as caught:
        read_plan(None, ["route=flat"], wishes)
    assert str(caught.value) == (
        "--set says route = 'flat', --hierarchical-allreduce says route = 'hierarchical'; drop one of them"
    )
    same = read_plan(None, ["bucket_bytes=2MiB"], settings("--fusion-threshold-mb", "2").plan)
    assert same == Plan(bucket_bytes=2**21)


def test_what_has_no_effect_says_so_once_and_why() -> None:
    notes = settings("--cycle-time-ms", "3", "--num-nccl-streams", "2", "--fusion-threshold-mb", "1").notes
    assert notes == (
        "--cycle-time-ms has no effect: an exchange starts when its gradients are there, not at the next beat",
        "--num-nccl-streams has no effect: one stream carries all exchanges",
    )


def test_a_shutdown_before_the_warning_is_said_to_have_no_effect() -> None:
    read = settings("--stall-check-shutdown-time-seconds", "10")
    assert read.plan == {}
    assert any("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=10 has no effect" in note for note in read.notes)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--fusion-threshold-mb -1", "fusion_threshold_mb=-1 must be >= 0"),
        ("--cycle-time-ms nan", "cycle_time_ms=nan must be >= 0"),
        ("--cycle-time-ms inf", "cycle_time_ms=inf must be >= 0"),
        ("--autotune-gaussian-process-noise 1.5", "autotune_gaussian_process_noise=1.5 must be in [0, 1]"),
        ("--stall-check-warning-time-seconds -3", "stall_check_warning_time_seconds=-3 must be >= 0"),
        ("--network-interfaces nosuch0", "this machine has no 'nosuch0'"),
        (
            "--mpi",
            "MPI support has not been built.  If this is not expected, ensure MPI is installed and reinstall "
            "Horovod with HOROVOD_WITH_MPI=1 to debug the build error.",
        ),
        (
            "--jsrun",
            "Horovod did not detect an LSF job.  The jsrun launcher can only be used in that environment. ",
        ),
    ],
)
def test_refusals(words: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("LSB_JOBID", raising=False)
        with pytest.raises(ConfigError) as caught:
            settings(*words.split())
    assert problem in caught.value.message


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--gloo --mpi", "not allowed with argument"),
        ("-H a:1 --hostfile f", "not allowed with argument"),
        ("--log-level LOUD", "invalid choice"),
        ("--fusion-threshold-mb many", "expected a whole number"),
        ("--heirarchical-allreduce", "unknown option --heirarchical-allreduce"),
    ],
)
def test_what_the_parser_refuses(words: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(*words.split())


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


CONFIG = """\
controller: gloo
params:
  fusion_threshold_mb: 16
  cycle_time_ms: 3
  cache_capacity: 64
  hierarchical_allreduce: true
  torus_allreduce: false
autotune:
  enabled: true
  gaussian_process_noise: 0.4
timeline:
  filename: horovod.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 30
library_options:
  num_nccl_streams: 2
  thread_affinity: 1
logging:
  level: INFO
  with_timestamp: true
  hide_timestamp: false
"""


def test_the_configuration_file_and_what_is_typed_goes_before_it(tmp_path: Path) -> None:
    path = config(tmp_path, CONFIG)
    read = settings("--fusion-threshold-mb", "8", "--config-file", path, "--no-autotune", "--stall-check")
    assert read.environment == {
        "HOROVOD_FUSION_THRESHOLD": "8388608", "HOROVOD_CYCLE_TIME": "3.0", "HOROVOD_CACHE_CAPACITY": "64",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_TORUS_ALLREDUCE": "0", "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.4", "HOROVOD_TIMELINE": "horovod.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1", "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "30", "HOROVOD_NUM_NCCL_STREAMS": "2", "HOROVOD_THREAD_AFFINITY": "1",
        "HOROVOD_LOG_LEVEL": "INFO", "HOROVOD_LOG_HIDE_TIME": "0",
    }  # fmt: skip
    assert {key: (wish.value, wish.is_typed) for key, wish in read.plan.items()} == {
        "bucket_bytes": (8 * 2**20, True),
        "route": ("hierarchical", False),
    }
    assert f"{path}: logging.hide_timestamp has no effect; use logging.with_timestamp" in read.notes
    plan = tmp_path / "plan.toml"
    plan.write_text('route = "flat"')
    with pytest.raises(ConfigError, match=r"plan.toml says route = 'flat', .*params.hierarchical_allreduce says"):
        read_plan(str(plan), (), read.plan)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("parms:\n  cycle_time_ms: 1\n", "unknown key 'parms'; did you mean 'params'?"),
        ("params:\n  cycle_time: 1\n", "unknown key 'cycle_time' in params; did you mean 'cycle_time_ms'?"),
        ("params:\n  cache_capacity: many\n", "params.cache_capacity: expected a whole number, got 'many'"),
        ("params:\n  fusion_threshold_mb: true\n", "expected a whole number, got True"),
        ("params:\n  fusion_threshold_mb: 1.5\n", "expected a whole number, got 1.5"),
        ("params:\n  hierarchical_allreduce: 1\n", "expected true or false, got 1"),
        ("params: 3\n", "params: expected keys with values, got 3"),
        ("params:\n  cache_capacity: -4\n", "cache_capacity=-4 must be >= 0"),
        ("logging:\n  level: LOUD\n", "expected one of TRACE, DEBUG"),
        ("controller: nccl\n", "No such controller supported: nccl"),
        ("controller: mpi\n", "MPI support has not been built."),
        ("- a\n", "holds a list, expected sections of keys"),
        ("a: [\n", "is not YAML"),
        ("1: 2\n", "unknown key 1"),
    ],
)  # fmt: skip
def test_a_configuration_file_with_a_slip(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings("--config-file", config(tmp_path, text))
    assert problem in str(caught.value)


def test_an_empty_configuration_file_a_missing_one_and_no_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings("--config-file", config(tmp_path, "params:\n")) == HorovodSettings()
    assert settings("--config-file", config(tmp_path, "")) == HorovodSettings()
    with pytest.raises(ConfigError, match="cannot read"):
        settings("--config-file", str(tmp_path / "missing.yaml"))
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"needs PyYAML; install it with: pip install -e \S+\[horovod\]"):
        settings("--config-file", config(tmp_path, ""))


def test_the_command_begins_at_the_first_word_that_is_no_option() -> None:
    options = run_command.make_parser().parse_args(
        ["-np", "2", "-H", "a:2", "--verbose", "python", "t.py", "-np", "9", "--mpi", "-v"]
    )
    assert options.command == ["python", "t.py", "-np", "9", "--mpi", "-v"]
    assert (options.size, options.hosts, options.controller) == (2, "a:2", None)
    for spelling in ("-np", "-n", "--np", "--num-proc"):
        assert parse(spelling, "3").size == 3


def test_hosts_of_the_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb\n")
    assert read_host_list(parse()) == []
    assert read_host_list(parse("-H", "a:1,b:2")) == [HostSlots("a", 1), HostSlots("b", 2)]
    for spelling in ("-hostfile", "--hostfile"):
        assert read_host_list(parse(spelling, str(file))) == [HostSlots("a", 2), HostSlots("b", 1)]
    assert read_host_list(parse("--hostfile", str(file), "--slots", "3"))[1] == HostSlots("b", 3)
    assert read_host_list(parse("-H", "a:2,b:2", "--include", "b:1")) == [HostSlots("b", 1, chosen=(1,))]
    for words, problem in (
        (["--include", "a"], "choose from a list of hosts"),
        (["--slots-per-host", "2"], "--slots-per-host is for lines without a number"),
        (["--hostfile", str(file), "--slots-per-host", "0"], "--slots-per-host 0: expected 1 to"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_host_list(parse(*words))


def test_ssh_options(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    read = read_ssh_options(parse("-p", "2222", "-i", str(key)))
    assert (read.port, read.identity_file) == (2222, key)
    for words in (("-p", "0"), ("-i", str(tmp_path / "none"))):
        with pytest.raises(ConfigError, match="--ssh-"):
            read_ssh_options(parse(*words))


def test_elastic_options(tmp_path: Path) -> None:
    script = tmp_path / "discover.sh"
    script.touch()
    assert read_elastic_options(parse("-np", "2")) is None
    assert read_elastic_options(parse("-np", "2", "--host-discovery-script", str(script))) == ElasticOptions(
        2, discovery_script=script
    )
    read = read_elastic_options(
        parse(
            "-np", "3", "--min-num-proc", "2", "--max-np", "4", "--slots-per-host", "2", "--elastic-timeout", "5",
            "--reset-limit", "0", "--blacklist-cooldown-range", "10", "100",
            "--host-discovery-script", str(script),
        )
    )  # fmt: skip
    assert read == ElasticOptions(2, 4, script, 5.0, 0, (10, 100), 2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--max-np 3", "--max-np is for elastic jobs"),
        ("--reset-limit 3", "--reset-limit is for elastic jobs"),
        ("--blacklist-cooldown-range 1 2", "--blacklist-cooldown-range is for elastic jobs"),
        ("--min-np 0", "--min-np 0: expected at least 1"),
        ("--min-np 3 --max-np 2", "--max-np 2: expected at least --min-np, 3"),
        ("--min-np 3 -np 2", "-np 2: expected at least --min-np, 3"),
        ("--min-np 1 -np 5 --max-np 4", "-np 5: expected at most --max-np, 4"),
        ("--min-np 1 --blacklist-cooldown-range 5 2", "expected two ascending numbers of seconds from 1 to 3600"),
        ("--min-np 1 --blacklist-cooldown-range 0 2", "expected two ascending numbers"),
        ("--min-np 1 --elastic-timeout -1", "elastic_timeout=-1.0 must be >= 0"),
        ("--min-np 1 --reset-limit -1", "reset_limit=-1 must be >= 0"),
        ("--min-np 1 -H a:4", "Cannot run in fault tolerance mode with fewer than 2 hosts."),
        ("-np 1 --host-discovery-script nosuch.sh", "no such file"),
        ("--host-discovery-script nosuch.sh", "needs -np or --min-np"),
    ],
)
def test_elastic_bounds_that_make_no_sense(words: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_elastic_options(parse(*words.split()))
    assert problem in str(caught.value)


def test_check_build_has_horovods_layout_and_our_name() -> None:
    lines = check_build().splitlines()
    assert lines[0].startswith("Farandole v")
    titles = [line for line in lines if line.endswith(":")][1:]
    assert titles == ["Available Frameworks:", "Available Controllers:", "Available Tensor Operations:"]
    entries = [line for line in lines if line.startswith("    ")]
    assert [entry[8:] for entry in entries] == [
        "TensorFlow", "PyTorch", "MXNet", "MPI", "Gloo", "NCCL", "DDL", "CCL", "MPI", "Gloo",
    ]  # fmt: skip
    assert [entry for entry in entries if entry in ("    [X] PyTorch", "    [X] Gloo")] == [
        "    [X] PyTorch", "    [X] Gloo", "    [X] Gloo",
    ]  # fmt: skip
    assert lines.count("    [ ] MPI") == 2


def test_version_and_build_start_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", "-cb"], ["run", "--check-build", "-np", "2"]):
        assert cli_main.run(words) == 0
        assert "Available Controllers:" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        cli_main.run(["run", "-v"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("farandole ")


def test_a_dry_run_shows_what_the_flags_come_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    code = cli_main.run(
        ["run", "-np", "3", "-H", "localhost:1,127.0.0.1:2", "--cycle-time-ms", "2", "--torus-allreduce",
         "--dry-run", "python", str(script)]
    )  # fmt: skip
    captured: Any = capsys.readouterr()
    assert code == 0
    assert "--cycle-time-ms has no effect" in captured.err
    assert 'route = "hierarchical"' in captured.out
    assert captured.out.count("HOROVOD_CYCLE_TIME=2.0") == 3
    circles = [line.strip(" \\") for line in captured.out.splitlines() if "HOROVOD_CROSS_" in line]
    pairs = [(circles[i].partition("=")[2], circles[i + 1].partition("=")[2]) for i in range(0, 6, 2)]
    assert pairs == [("0", "2"), ("1", "2"), ("0", "1")]


@pytest.mark.parametrize("text", ["--bind-to none", "env A", "1A=2", "env 'A=1"])
def test_words_for_mpi_that_set_no_variable_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--mpi-launch-flag"):
        settings("--mpi-launch-flag", text)
