"""Jobs on "hosts" that a fake remote shell makes of this machine: all but ssh itself, at a tenth of the time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.ranks.test_launch import FARANDOLE, run, script

SHELL = '#!/bin/sh\n# $1 is the host, $2 the remote command\necho "Welcome to $1"\nexec /bin/sh -c "$2"\n'


@pytest.fixture
def shell(tmp_path: Path) -> list[str]:
    file = tmp_path / "shell"
    file.write_text(SHELL)
    file.chmod(0o755)
    return ["--ssh-command", f"{file} {{host}}"]


@pytest.mark.full("further")
def test_much_output_arrives_whole_and_in_order(tmp_path: Path, shell: list[str]) -> None:
    text = "import os\nfor i in range(20_000): print(os.environ['RANK'], i, 'x' * 100)"
    result = run(tmp_path, "run", "-H", "a:1,b:1", *shell, "--", sys.executable, "-S", script(tmp_path, text))
    assert result.returncode == 0, result.stderr
    for rank in ("0", "1"):
        mine = [line.split()[2] for line in result.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [str(i) for i in range(20_000)]
        (log,) = (tmp_path / "runs").glob(f"*/logs/rank_{rank}.log")
        assert len(log.read_text().splitlines()) == 20_000


@pytest.mark.full("slow")
def test_a_console_that_nobody_reads_does_not_end_the_job(tmp_path: Path, shell: list[str]) -> None:
    """The ranks wait, as with any pipe that is full; nobody takes the hosts for dead."""
    import subprocess

    text = "import time\nfor i in range(30_000): print('x' * 100)\nprint('the end')"
    command = [*FARANDOLE, "run", "-H", "a:1,b:1", *shell, "--", sys.executable, "-S", script(tmp_path, text)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(4)
        assert process.poll() is None
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert out.count("the end") == 2


def test_dry_run_prints_the_commands(tmp_path: Path, shell: list[str]) -> None:
    words = ["run", "-H", "a:1,b:1", "--dry-run", "--", sys.executable, script(tmp_path, "")]
    result = run(tmp_path, *words)
    assert result.returncode == 0
    assert "# host b, 1 rank(s): ssh -T -x -o BatchMode=yes" in result.stdout
    described = json.loads(run(tmp_path, *words[:3], "--json", *words[3:]).stdout)
    assert sorted(described["connections"]) == ["a", "b"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.gate_cases("words2---ssh-option '-oX': expected NAME=VALUE")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-x", "NOT_SET_ANYWHERE"], "-x NOT_SET_ANYWHERE: it is not set here"),
        (["--chdir", "a\nb"], "--chdir 'a\\nb': expected a single line"),
        (["--ssh-option", "-oX"], "--ssh-option '-oX': expected NAME=VALUE"),
        (["--ssh-command", "no-such-shell"], "--ssh-command 'no-such-shell': no such command"),
        (["--ssh-command", "'"], '--ssh-command "\'": No closing quotation'),
    ],
)
def test_bad_options(tmp_path: Path, words: list[str], says: str) -> None:
    if words[0] == "--ssh-option":
        words = [f"--ssh-option={words[1]}"]
    result = run(tmp_path, "run", "-H", "a:1,b:1", *words, "--", sys.executable, script(tmp_path, ""))
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_command_that_a_host_does_not_have(tmp_path: Path, shell: list[str]) -> None:
    result = run(
        tmp_path,
        "run",
        "-H",
        "a:1,b:1",
        "--python",
        "/no/python",
        *shell,
        "--",
        sys.executable,
        script(tmp_path, ""),
    )
    assert result.returncode == 2
    assert "farandole: host a failed: it has no /no/python" in result.stderr or "host b failed" in result.stderr
