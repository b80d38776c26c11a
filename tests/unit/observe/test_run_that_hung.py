"""A run that ended while it hung, or failed: what a diagnosis says first."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from farandole.core.vocabulary.run_files import FAILURE, INTERRUPTED, RUN, SAVES, STALL, SavesAccount
from farandole.launch.start.start import interruption_of
from farandole.observe.diagnose.verdict import diagnose
from farandole.observe.records.run_reader import how_it_failed, how_it_hung

NOW = 1_000_000.0
POSITIONS = [
    {"rank": 0, "step": 5, "kind": "waiting", "place": "hang.py:5", "operation": "fd.mean", "busy": False},
    {
        "rank": 1,
        "step": 5,
        "kind": "waiting",
        "place": "base.py:10 (step)",
        "operation": "backward",
        "busy": False,
    },
]
SAID = (
    "The run hung after step 5: rank 0 waited in fd.mean at hang.py:5, rank 1 in backward at base.py:10 (step); "
    "they wait for each other: every rank has to make the same calls in the same order."
)


def leave(directory: Path, name: str, **values: object) -> None:
    (directory / name).write_text(json.dumps(values))


def test_an_interrupted_run_that_hung(tmp_path: Path) -> None:
    leave(tmp_path, RUN, size=2)
    leave(tmp_path, INTERRUPTED, hanging=True, positions=POSITIONS)
    assert how_it_hung(tmp_path) == SAID
    assert diagnose(tmp_path).verdict.startswith(SAID)


def test_a_run_that_was_killed_while_it_hung(tmp_path: Path) -> None:
    leave(tmp_path, RUN, size=2)
    leave(tmp_path, STALL, step=5, seconds=11.0, positions=POSITIONS)
    assert diagnose(tmp_path).verdict.startswith(SAID)


KILLED = {"rank": 1, "host": "vm", "step": 24, "cause": "killed by signal 9 (SIGKILL)"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "rank 1 on vm failed after step 24: killed by signal 9 (SIGKILL)"),
        ({"step": 0}, "rank 1 on vm failed before its first step: killed by signal 9 (SIGKILL)"),
        ({"rank": None, "step": None, "cause": "it is out of reach."}, "host vm failed: it is out of reach."),
        ({"rank": None, "host": "", "cause": "no space left"}, "no space left"),
    ],
)
def test_a_run_that_failed(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    leave(tmp_path, RUN, size=2)
    leave(tmp_path, FAILURE, **(KILLED | changes))
    assert how_it_failed(tmp_path) == said
    assert diagnose(tmp_path).verdict.startswith(f"The run failed: {said.rstrip('.')}. Until then: ")
    leave(tmp_path, STALL, step=5, seconds=11.0, positions=POSITIONS)
    assert diagnose(tmp_path).verdict.startswith(SAID)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}"])
def test_an_account_of_a_failure_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    leave(tmp_path, RUN, size=2)
    (tmp_path / FAILURE).write_text(text)
    assert how_it_failed(tmp_path) == ""
    assert diagnose(tmp_path).verdict.startswith("Nothing to diagnose")


@pytest.mark.parametrize("values", [{"hanging": False, "positions": POSITIONS}, {"hanging": True}, {}])
def test_other_runs_did_not_hang(tmp_path: Path, values: dict[str, object]) -> None:
    leave(tmp_path, RUN, size=2)
    leave(tmp_path, INTERRUPTED, **values)
    assert how_it_hung(tmp_path) == ""
    (tmp_path / INTERRUPTED).write_text("[")
    assert "hung" not in diagnose(tmp_path).verdict


def test_the_launcher_says_where_ranks_stood(tmp_path: Path) -> None:
    leave(tmp_path, STALL, step=5, seconds=11.0, positions=POSITIONS)
    (tmp_path / "stacks").mkdir()
    interruption = interruption_of(tmp_path, 2, [], 2)
    first, second = interruption.to_text(tmp_path).splitlines()
    assert first == (
        "farandole: interrupted while hanging: rank 0 waited in fd.mean at hang.py:5, "
        "rank 1 in backward at base.py:10 (step)"
    )
    assert second.startswith("farandole: stopped all ranks on SIGINT; logs in ")
    assert second.endswith(f", stacks in {tmp_path / 'stacks'}; exit code 130")
    (tmp_path / STALL).unlink()
    assert len(interruption_of(tmp_path, 15, [], 2).to_text(tmp_path).splitlines()) == 1


@pytest.mark.parametrize(
    ("account", "says"),
    [
        (SavesAccount("kept"), "no checkpoint of this run is in kept"),
        (SavesAccount("kept", begun=9), "the save of step 9 is not whole; no checkpoint of this run is in kept"),
        (
            SavesAccount("kept", 9, NOW - 2, 9),
            "the last whole checkpoint is that of step 9 in kept, made 2 s ago",
        ),
        (
            SavesAccount("kept", 9, NOW - 120, 12),
            "the save of step 12 is not whole; the last whole checkpoint is that of step 9 in kept, made 2:00 ago",
        ),
    ],
)
def test_the_launcher_says_whether_the_last_save_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account: SavesAccount, says: str
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    account.write(str(tmp_path))
    interruption = interruption_of(tmp_path, 15, [], 2)
    first, second = interruption.to_text(tmp_path).splitlines()
    assert first == f"farandole: {says}"
    assert second.startswith("farandole: stopped all ranks on SIGTERM; logs in ")
    interruption.write(tmp_path)
    assert SavesAccount(**json.loads((tmp_path / INTERRUPTED).read_text())["saves"]) == account


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "{}", '{"directory": "", "other": 1}', '{"directory": "", "when_seconds": "x"}']
)
def test_an_account_of_saves_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / SAVES).write_text(text)
    assert SavesAccount.read(tmp_path) is None
