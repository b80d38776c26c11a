"""The command line: what it accepts, what it refuses, and that nothing makes it print a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.cli.main import COMMANDS, run
from farandole.core.job_plan import read_plan
from farandole.core.vocabulary.errors import ConfigError, FarandoleError, LaunchError
from farandole.core.vocabulary.spec import Plan
from farandole.launch.start import request as command
from farandole.launch.start.placing import place_job
from farandole.launch.start.request import JobRequest
from farandole.launch.supervise import ranks
from farandole.launch.supervise.job_loop import Outcome
from farandole.version import VERSION


def call(*words: str) -> tuple[int, str, str]:
    raw = (io.BytesIO(), io.BytesIO())
    out, err = (io.TextIOWrapper(stream, "utf-8", write_through=True) for stream in raw)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run(words)
        except SystemExit as stop:  # argparse's --help
            code = int(stop.code or 0)
    return code, raw[0].getvalue().decode(), raw[1].getvalue().decode()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "plan.toml").write_text("accumulate = 2\n")
    (tmp_path / "newer.toml").write_text("version = 99\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["rum"], "unknown command 'rum'; did you mean 'run'?"),
        (["import", "trace.json"], "farandole import is gone; record the training itself: farandole run, or "),
        (
            ["simulate", "--noise=0.05", "--gpus", "8"],
            "simulate: --noise is gone; leave it out: farandole plan --measure",
        ),
        (["simulate", "plan.toml", "--run-dir", "run"], "simulate: --run-dir is gone; record a real run: "),
        (["export", "runs/a", "--to", "horovod"], "invalid choice: 'horovod'; export it --to chrome"),
        (["run", "--ranks-per-switch", "2", "--", "true"], "run: --ranks-per-switch is gone; leave it out: "),
        (["verify", "--ranks-per-switch=2", "--", "true"], "verify: --ranks-per-switch is gone; leave it out: "),
        (["--verbos"], "unknown option '--verbos'"),
        (
            ["run", "--as-horovod", "--backend", "farandole", "--", "python", "train.py"],
            "--as-horovod --backend farandole: Horovod's operations are exchanged without torch's process groups",
        ),
        (["run", "--backend", "glo", "--", "python", "train.py"], "'glo'"),
        (
            ["run", "-np", "2", "--min-np", "1", "--backend", "farandole", "--", "python", "train.py"],
            "--backend farandole in an elastic job: ranks that wait in shared memory cannot be freed",
        ),
        (["run"], "no command was given; for example: farandole run -np 2 -- python train.py"),
        (["run", "-np", "0", "--", "python", "train.py"], "-np 0: expected at least 1"),
        (["run", "-np", "-3", "--", "python", "train.py"], "-np -3: expected at least 1"),
        (["run", "-np", "two", "--", "python", "train.py"], "expected a whole number, got 'two'"),
        (["run", "-np", "99999", "train.py"], "expected at most 4096"),
        (["run", "--base-line", "x", "--", "python", "train.py"], "did you mean '--baseline'?"),
        (["run", "--", "python", "trian.py"], "script trian.py does not exist; did you mean 'train.py'?"),
        (["run", "--", "no-such-command"], "command 'no-such-command' was not found"),
        (["run", "--", "python", "broken.py"], "broken.py:2: "),
        (["run", "--", "python", "folder"], "folder is a directory without a __main__.py"),
        (["run", "--", "python", "-m", "package"], "package package has no __main__.py"),
        (["run", "--", "python"], "no script was given after python"),
        (["run", "--", "python", "-m"], "no module was given after python -m"),
        (
            ["run", "--set", "acumulate=2", "train.py"],
            "--set: unknown key 'acumulate'; did you mean 'accumulate'?",
        ),
        (["run", "--set", "accumulate", "train.py"], "--set 'accumulate': expected key=value"),
        (["run", "--set", "accumulate=x", "train.py"], "--set: accumulate: expected a whole number, got 'x'"),
        (
            ["run", "--plan", "no.toml", "train.py"],
            "there is no file no.toml; farandole plan ... --out FILE writes",
        ),
        (["explain", "no.toml"], "there is no file no.toml; farandole plan ... --out FILE writes"),
        (["simulate", "no.toml"], "there is no file no.toml; farandole plan ... --out FILE writes"),
        (["tune", "-np", "2"], "no command was given; for example: farandole tune -np 2 -- python train.py"),
        (["compare"], "compare: no runs were given, and runs/ holds 0 of two; name two run directories"),
        (["compare", "runs/a"], "compare: one run was given; farandole compare runs/a runs/ANOTHER"),
        (
            ["run", "-np", "2", "--set", "tensor=3", "train.py"],
            "plan: tensor 3 needs a multiple of 3 ranks, but there are 2; start 3 ranks, or change the degrees",
        ),
        (
            ["run", "--set", 'tensor_recipe={"*"="rows"', "train.py"],
            '--set: tensor_recipe: expected a table of texts, got \'{"*"="rows"\'',
        ),
        (["run", "--plan", "newer.toml", "train.py"], "plan version 99 is newer than 1"),
        (["run", "--run-dir", "train.py", "train.py"], "--run-dir train.py is not a directory"),
        (["verify", "--steps", "0", "train.py"], "--steps 0: expected at least 1"),
        (["report"], "no RUN was given, and runs/ holds none; name a run directory"),
        (["diagnose"], "no RUN was given, and runs/ holds none; name a run directory"),
        (["report", "nowhere"], "nowhere is not a run directory"),
        (["report", "folder"], "folder holds nothing of a run"),
        (["demo", "--dataset", "mnist"], "--dataset mnist: unknown data set; did you mean 'fashion-mnist'?"),
        (["demo", "--dataset", "fashion-mnist"], "--dataset fashion-mnist needs the directory of its files"),
        (["demo", "--dataset", "fashion-mnist", "nowhere"], "apt-get install dataset-fashion-mnist"),
        (["demo", "--dataset", "text", "folder"], "too many words"),
        (["demo", "--steps", "1"], "--steps 1: expected at least 4"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(place: Path, words: list[str], text: str) -> None:
    code, out, err = call(*words)
    assert text in err
    assert (code, out) == (2, "")
    assert err.startswith("farandole: ")
    assert len(err.splitlines()) == 1
    assert not (place / "runs").exists(), "nothing is left of a refused command"


@pytest.mark.parametrize("command", [[], *[[name] for name in COMMANDS]])
def test_help_has_examples(command: list[str]) -> None:
    code, out, _ = call(*command, "--help")
    assert code == 0
    assert "examples:" in out
    assert out.count("farandole ") > 2
    assert max(map(len, out.splitlines())) <= 100
    assert call("--version") == (0, f"farandole {VERSION}\n", "")


def test_a_dry_run_starts_nothing_and_says_everything(place: Path) -> None:
    code, out, _ = call(
        "run", "-np", "3", "--dry-run", "--set", "accumulate=4", "--", "python", "train.py", "--lr", "1"
    )
    assert code == 0
    assert out.count("train.py --lr 1") == 3
    assert "accumulate = 4" in out
    assert "FARANDOLE_RANK=2" in out
    code, out, _ = call("run", "-np", "2", "--dry-run", "--json", "--", "python", "train.py")
    described = json.loads(out)
    assert [rank["environment"]["RANK"] for rank in described["ranks"]] == ["0", "1"]
    assert described["ranks"][1]["environment"]["HOROVOD_RANK"] == "1"
    assert not (place / "runs").exists()


SHOW = """
import json, os, sys
names = [name for name in os.environ if name.startswith(("FARANDOLE_", "HOROVOD_", "OMP_", "RANK", "X"))]
print("told", json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]))
"""


def test_what_a_dry_run_prints_is_a_script_that_starts_the_ranks_of_the_job(place: Path) -> None:
    """The page is given to a shell, the job is run for real: the ranks are told the same."""
    (place / "train.py").write_text(SHOW)
    words = [
        "-np",
        "2",
        "--set",
        "codec=int8",
        "-x",
        "X=a b",
        "--run-dir",
        "kept",
        "--",
        sys.executable,
        "train.py",
    ]
    code, page, err = call("run", "--dry-run", *words, "--lr", "1 2")
    assert code == 0, err
    started = [
        subprocess.run(["sh", "-c", text], check=True, capture_output=True, text=True, timeout=50).stdout
        for text in (
            page,
            shlex.join([sys.executable, "-m", "farandole", "run", "--quiet", *words, "--lr", "1 2"]),
        )
    ]
    shown, real = ([json.loads(line.partition("told ")[2]) for line in out.splitlines()] for out in started)
    real.sort(key=lambda told: told[1]["RANK"])
    assert [told[1]["RANK"] for told in shown] == ["0", "1"]
    for (arguments, mine), (expected, theirs) in zip(shown, real, strict=True):
        assert arguments == expected == ["--lr", "1 2"]
        assert mine.pop("FARANDOLE_PORT") == "(a free port)"
        assert int(theirs.pop("FARANDOLE_PORT")) > 0
        assert theirs.pop("FARANDOLE_SECRET"), "made anew, and for the ranks alone"
        assert mine["X"] == "a b"
        assert mine == theirs
    assert Plan.read(place / shown[0][1]["FARANDOLE_PLAN"]) == Plan(codec="int8")


def test_a_dry_run_shows_the_job_that_would_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a rank is told, but for the port; the plan among it."""
    words = ["-np", "2", "--set", "codec=int8", "--run-dir", "kept", "--hierarchical-allreduce"]
    words += ["-x", "MINE=1", "--as-horovod", "--quiet", "--", "python", "train.py"]
    told = []

    def start_rank(rank: int, command: list[str], environment: dict[str, str], *_: object, **__: object) -> None:
        told.append((rank, command, environment))
        if rank == 1:
            raise LaunchError("far enough")

    monkeypatch.setattr(ranks, "start_rank", start_rank)
    monkeypatch.setattr(ranks.HostRanks, "_follow", lambda self, process: None)
    code, out, err = call("run", "--dry-run", "--json", *words)
    assert code == 0, err
    described = json.loads(out)
    assert described["plan"]["codec"] == "int8"
    assert call("run", *words)[2].endswith("farandole: far enough\n")
    assert len(told) == 2
    plan = Plan.from_mapping(described["plan"], where="").to_toml()
    for rank, started, environment in told:
        shown = described["ranks"][rank]["environment"]
        assert started == described["command"]
        for name in shown.keys() - {"FARANDOLE_PORT", "MASTER_PORT"}:
            assert shown[name] == environment[name]
        assert "FARANDOLE_SECRET" not in shown, "it is made anew, and for the ranks alone"
        told_too = shown.keys() | {"FARANDOLE_SECRET"}
        assert all(name in told_too or os.environ.get(name) == value for name, value in environment.items())
        assert Path(shown["FARANDOLE_PLAN"]).read_text() == plan


@pytest.mark.parametrize(
    "words",
    [
        "-uc pass", "-Ic pass", "-Bcpass", "-um timeit", "-umtimeit", "-uW error train.py", "-Xdev -B train.py",
        "-OWerror train.py", "--check-hash-based-pycs never train.py", "-V", "-VV", "--version", "-uV", "-h",
        "-u -", "--help-env", "-W ignore -c pass",
    ],
)  # fmt: skip
def test_options_of_python(place: Path, words: str) -> None:
    command_line = ["python", *words.split()]
    assert command.read_command(command_line)[1:] == command_line[1:]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-uB", "no script was given after python"), ("-uW error", "no script was given after python"),
        ("-um", "no module was given after python -m"), ("-um package", "package package has no __main__.py"),
        ("-umpackage", "package package has no __main__.py"), ("-uX dev missing.py", "missing.py does not exist"),
    ],
)  # fmt: skip
def test_options_of_python_that_run_nothing(place: Path, words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        command.read_command(["python", *words.split()])


def test_plans_of_the_command_line(place: Path) -> None:
    assert read_plan(None, []) is None
    assert read_plan("plan.toml", []) == Plan(accumulate=2)
    assert read_plan("plan.toml", ["accumulate=3", "bucket_bytes=1MiB"]) == Plan(
        accumulate=3, bucket_bytes=1 << 20
    )


def test_commands_to_start(place: Path) -> None:
    assert command.read_command(["--", "train.py", "-x"]) == [sys.executable, "train.py", "-x"]
    assert command.read_command(["python", "-u", "-W", "error", "train.py"])[-1] == "train.py"
    assert command.read_command(["python", "-c", "print(1)"])[-1] == "print(1)"
    assert command.read_command(["echo", "--", "x"]) == ["echo", "--", "x"]
    assert command.script_label(["--", "python", "a/train.py", "--lr"]) == "train"
    assert command.script_label(["--", "python", "-m", "pkg.mod"]) == "pkg.mod"


def test_more_ranks_than_cores_is_a_warning() -> None:
    placed = place_job(JobRequest(["true"], size=64))
    assert len(placed.places) == 64
    assert placed.threads == 1
    assert "64 ranks on" in placed.warnings[0]
    assert all(place.cores == () for place in placed.places)


WORDS = st.sampled_from(
    ["run", "verify", "report", "demo", "-np", "--np", "2", "0", "-1", "--", "python", "train.py", "--plan",
     "plan.toml", "--set", "accumulate=2", "a=b", "--run-dir", "d", "--json", "--dry-run", "-m", "-c", "folder",
     "--steps", "--dataset", "text", "é", "'; rm -rf /", "$(reboot)", "-x", "--help", "..", "/dev/null", ""]
)  # fmt: skip


def nothing_runs(*_: object, **__: object) -> None:
    raise FarandoleError("nothing runs here")


COMMAND_LINES = st.lists(
    st.one_of(WORDS, st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)),
    max_size=7,
)
LINES_OF_ONE_PLACE: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


def require_no_traceback(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    from farandole.bench import demo

    monkeypatch.setattr("farandole.launch.supervise.ranks.Supervisor.run", lambda self: Outcome(0, 0.0))
    monkeypatch.setattr(demo, "_command", nothing_runs)
    code, _, _ = call(*words)
    assert code in (0, 1, 2)


@settings(max_examples=60, **LINES_OF_ONE_PLACE)
@given(COMMAND_LINES)
def test_no_command_line_makes_a_traceback(place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    require_no_traceback(monkeypatch, words)


@pytest.mark.full("slow")
@settings(max_examples=400, **LINES_OF_ONE_PLACE)
@given(COMMAND_LINES)
def test_no_command_line_of_many_makes_a_traceback(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    require_no_traceback(monkeypatch, words)


def test_commands_start_in_milliseconds_and_without_torch() -> None:
    code = (
        "import sys; from farandole.cli.main import run;"
        "run(['run', '-np', '2', '--dry-run', '--', 'python', '-c', 'pass']);"
        "assert not {'torch', 'numpy', 'jinja2', 'rich'} & set(sys.modules), 'heavy imports'"
    )
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - begin < 5
