"""`farandole emulate`: what its line becomes. No host is made here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from farandole.launch.namespaces import EmulatedRun
from tests.unit.cli.test_cli import call

FARANDOLE = [sys.executable, "-m", "farandole"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the commands that `emulate` would start on host0."""
    commands: list[list[str]] = []

    class NoNetwork:
        note = ""

        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> NoNetwork:
            return self

        def __exit__(self, *_: object) -> None: ...

    def session(network: object, command: Sequence[str], changes: object, **_: object) -> EmulatedRun:
        commands.append(list(command))
        return EmulatedRun(0, 0.0, [])

    monkeypatch.setattr("farandole.launch.namespaces.Network", NoNetwork)
    monkeypatch.setattr("farandole.launch.namespaces.run_session", session)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return commands


def test_the_plan_goes_to_the_run_on_the_hosts(started: list[list[str]], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("accumulate = 2\n")
    code, _, err = call("emulate", "--plan", str(plan), "--set", "codec=int8", "--", "true", "--set", "x")
    assert code == 0, err
    assert started == [[*FARANDOLE, "run", "--plan", str(plan), "--set", "codec=int8", "--", "true", "--set", "x"]]


def test_the_run_directory_goes_to_the_job(started: list[list[str]]) -> None:
    call("emulate", "--run-dir", "a b", "--", "true")
    call("emulate", "--run-dir", "a b", "--", "farandole", "verify", "--", "true")
    assert started == [[*FARANDOLE, name, "--run-dir", "a b", "--", "true"] for name in ("run", "verify")]


def test_what_the_command_says_itself_comes_later(started: list[list[str]]) -> None:
    call("emulate", "--backend", "farandole", "--", "farandole", "run", "--", "true")
    call("emulate", "--backend", "farandole", "--", "true")
    for _ in range(2):
        assert started.pop() == [*FARANDOLE, "run", "--backend", "farandole", "--", "true"]
    _, _, err = call("emulate", "--backend", "gloo", "--", "farandole", "verify", "--", "true")
    assert "emulate: --backend is for farandole run, and `farandole verify` has no such option" in err
    call("emulate", "--quiet", "--", "true")
    assert started.pop() == [*FARANDOLE, "run", "--quiet", "--", "true"]
    _, _, err = call("emulate", "--quiet", "--", "farandole", "verify", "--", "true")
    assert "emulate: --quiet is for farandole run" in err
    call("emulate", "--set", "codec=int8", "--", "farandole", "verify", "--set", "codec=bf16", "--", "true")
    assert started == [[*FARANDOLE, "verify", "--set", "codec=int8", "--set", "codec=bf16", "--", "true"]]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--set", "codce=int8", "--", "true"], "--set: unknown key 'codce'; did you mean 'codec'?"),
        (["--plan", "no.toml", "--", "true"], "there is no file no.toml"),
        (
            ["--run-dir", "x", "--", "farandole", "doctor"],
            "emulate: --run-dir is for a job, and `farandole doctor` starts none with a plan; leave it out",
        ),
        (
            ["--set", "codec=int8", "--", "farandole", "doctor"],
            "emulate: --set is for a job, and `farandole doctor` starts none with a plan; leave it out, or start",
        ),
    ],
)
def test_a_wrong_plan_is_refused_before_any_host_is_made(
    started: list[list[str]], words: list[str], text: str
) -> None:
    code, _, err = call("emulate", *words)
    assert (code, started) == (2, [])
    assert text in err


def test_a_script_of_horovods_names_is_started_so(started: list[list[str]]) -> None:
    for words in (["python", "-c", "0"], ["farandole", "verify", "-np", "2", "--", "python", "-c", "0"]):
        code, _, err = call("emulate", "--hosts", "2", "--as-horovod", "--", *words)
        assert code == 0, err
    assert [command[:5] for command in started] == [
        [*FARANDOLE, "run", "--as-horovod"], [*FARANDOLE, "verify", "--as-horovod"]
    ]  # fmt: skip
    code, _, err = call("emulate", "--hosts", "2", "--as-horovod", "--", "farandole", "doctor")
    assert code == 2
    assert "--as-horovod is for farandole run" in err
