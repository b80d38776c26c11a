"""Input that once ended in a traceback, a hang, or an account that no person could read. One test each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farandole.cli.main import run
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.text import plain, quoted
from farandole.launch.job.hosts import HostSlots, parse_hostfile, read_hostfile
from tests.line_fuzz import yaml_bomb

DRY = ["run", "--dry-run"]
LONG = "a" * 5000


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line that `farandole run` refuses `words` with."""
    assert run([*DRY, *words]) == 2
    said = capsys.readouterr().err
    assert said.endswith("\n")
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("blank", [" ", "\t", "\u00a0"])
def test_a_long_line_of_blanks_takes_no_time(blank: str) -> None:
    begin = time.process_time()
    assert parse_hostfile(f"a slots{blank * 200_000}=2\nb{blank * 200_000}", where="f") == [
        HostSlots("a", 2), HostSlots("b", 1)
    ]  # fmt: skip
    assert time.process_time() - begin < 2


def test_a_host_file_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa slots=2\r\nb slots=1\r\n")
    assert read_hostfile(path) == [HostSlots("a", 2), HostSlots("b", 1)]


def test_a_host_file_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero is longer than"):
        read_hostfile(Path("/dev/zero"))


def test_a_long_value_is_shown_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(f"good\n{LONG}! slots=2", where="f")
    assert str(caught.value).startswith("f, line 2: 'aaa")
    assert "...(5001 characters)..." in str(caught.value)
    assert str(caught.value).endswith("expected a line such as: node1 slots=4")
    assert len(str(caught.value)) < 250
    said = refusal(capsys, "--fusion-threshold-mb", LONG, "true")
    assert len(said) < 1600
    assert said.endswith("see: farandole run --help\n"), "what to do is still there"


def test_an_account_does_not_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--auto\x1b[2J\u202etune", "true")
    assert r"unknown option --auto\x1b[2J\u202etune" in said
    assert plain("a\tb\nc\udcff\u2028") == "a\\tb\nc\\udcff\\u2028"
    assert quoted("a\n") == r"'a\n'"


def test_a_nul_character_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--plan", "a\0", "true"], ["--run-dir=\0", "true"], ["tr\0ue"], ["-H", "a\0:1", "true"]):
        assert "holds a NUL character" in refusal(capsys, *words)


def test_a_name_of_bytes_that_are_no_text_is_printed_as_it_came(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "farandole", *DRY, "--run-dir", os.fsdecode(b"su\x86rm"), "true"]
    done = subprocess.run(words, capture_output=True, cwd=tmp_path, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert os.fsencode(tmp_path) + b"/su\x86rm'" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["python", f"{LONG}.py"], "does not exist"),
        (["python", f"{LONG}/train.py"], "does not exist"),
        (["-i", LONG, "true"], "no such file"),
        (["--host-discovery-script", LONG, "--min-np", "1", "true"], "no such file"),
        (["--plan", LONG, "true"], "cannot read"),
        (["--config-file", LONG, "true"], "cannot read"),
        (["--hostfile", LONG, "true"], "cannot read host file"),
        ([LONG], "was not found"),
    ],
)
def test_a_name_that_no_file_can_have(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, *words)


def test_shards_in_an_elastic_job(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "-np", "2", "--min-np", "1", "--set", "zero=2", "true")
    assert "plan: zero = 2 in an elastic job" in said, said
    assert "fd.load takes any number" in said, said


def test_ranks_that_train_on_their_own_in_an_elastic_job(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "-np", "2", "--min-np", "1", "--set", "sync=diloco", "true")
    assert 'plan: sync = "diloco" in an elastic job' in said, said


def test_a_module_and_a_run_directory_that_no_file_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*DRY, "python", "-m", LONG]) == 0, "python may find it elsewhere"
    capsys.readouterr()
    assert run(["run", "--run-dir", LONG, "true"]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_numbers_beyond_all_bounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bucket_bytes: expected a whole number" in refusal(capsys, "--set", f"bucket_bytes={'9' * 400}", "true")


@pytest.mark.parametrize(
    ("name", "text", "option"),
    [
        ("deep.json", "[" * 100_000, "--plan"),
        ("deep.toml", "a = " + "[" * 100_000, "--plan"),
        ("bomb.yaml", yaml_bomb().decode(), "--config-file"),
        ("endless.yaml", "[" * 100_000, "--config-file"),
        ("deep.yaml", "[" * 2_000, "--config-file"),
        ("deep.py", "-" * 100_000 + "1", "python"),
        ("wide.py", "1" + "+1" * 100_000, "python"),
    ],
)
def test_files_that_are_deeper_than_a_reader(
    tmp_path: Path, name: str, text: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    begin = time.process_time()
    assert str(path) in refusal(capsys, option, str(path), *(["true"] if option.startswith("-") else []))
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("option", ["--ssh-option", "--hosts", "--np", "--set", "--python", "--on"])
def test_two_hyphens_are_no_value(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected a value, got '--'" in refusal(capsys, f"{option}=--", "true")


def test_an_option_of_one_hyphen_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    """`-c` was taken for `-cb`, which prints what was built and starts nothing."""
    assert "unknown option -c" in refusal(capsys, "-np", "2", "-c", "print()")
    assert run([*DRY, "-p22", "-Hlocalhost:2", "true"]) == 0, "a value may stick to its option"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "run --dry-run --set bucket_bytes=4XB -- train.py",
            "bucket_bytes: expected a whole number of bytes, such as 4MiB, got '4XB'",
        ),
        ("run --dry-run --set timeout_seconds=-1 -- train.py", "expected seconds from 0, such as 600"),
        ("run --dry-run --set zero -- train.py", "--set 'zero': expected key=value; such as zero=1"),
        ("run --dry-run --set zero=4 -- train.py", "zero = 4, expected 0 to 3; 3 shards most"),
        (
            "run --dry-run -np 2 --set balance=2,1,1 -- train.py",
            "3 shares, and 2 ranks train on different samples",
        ),
        ("run -np two -- train.py", "expected a whole number, got 'two'"),
        ("run -np 2 --run-dir train.py -- train.py", "is not a directory; name a new one, such as runs/first"),
        ("run --dry-run --on slurm -np 4 --set zero=9 -- train.py", "zero = 9, expected 0 to 3"),
        (
            "run --dry-run --on kubernetes --image x -np 4 --set tensor=3 -- train.py",
            "needs a multiple of 3 ranks",
        ),
        ("run --dry-run --on slurm -np 4 --plan missing.toml -- train.py", "there is no file missing.toml"),
        ("run --dry-run --on slurm -np 4 --time 90x -- train.py", "--time 90x: expected minutes, hours:minutes"),
        ("run --dry-run --on slurm -np 4 --time 5 --warn-before 600 -- train.py", "the job ends after 300 s"),
        ("run --dry-run --on slurm -np 4 --priority abc -- train.py", "expected a number from 0, or TOP"),
        ("run --dry-run --on kubernetes --image= -np 4 -- train.py", "--image '': expected a name"),
        (
            "run --dry-run --on mpi --hostfile nothere -np 4 -- train.py",
            "--hostfile nothere: there is no such file",
        ),
        ("verify -np 2", "for example: farandole verify -np 2"),
        ("explain train.py", "(at line 1, column 8); farandole plan ... --out FILE writes one"),
        ("plan train.py:m --cluster train.py --gpus 2", "farandole measure --out cluster.toml writes one"),
        ("plan train.py:m --cluster dgx-a100 --gpus 0", "--gpus 0: expected at least 1"),
        ("estimate train.py:m --memory lots", "--memory 'lots' is not a number of bytes such as 25MiB"),
        ("estimate missing.py:m", "no file 'missing.py'; name a file that is there: train.py:make_model"),
        ("estimate train.py:nix", "train.py has no 'nix'; known: none"),
        ("diagnose missing", "missing is not a run directory; name a directory below runs/"),
        ("report .", "expected run.json or events-rank0.jsonl"),
        ("compare missing", "one run was given; farandole compare missing runs/ANOTHER"),
        ("top missing --once", "missing is not a run directory"),
        ("checkpoint verify missing", "expected a directory of checkpoints; name the directory that was given"),
        ("tune --steps 0 -- train.py", "--steps 0: expected at least 1"),
    ],
)
def test_a_wrong_input_names_value_expectation_and_remedy(
    line: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import os\n")
    assert run(line.split()) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
