"""Proposed commands can be pasted whole: they are the command that was run, with the change in it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from farandole.cli.commands.run import make_parser
from farandole.observe.diagnose.finding import command_with
from farandole.observe.records.run_reader import RunRecords

SCRIPT = "python train.py --lr 0.1"


def of(typed: str | None, command: str = f"/usr/bin/{SCRIPT}", **facts: Any) -> RunRecords:
    words = {} if typed is None else {"typed_command": shlex.split(typed)}
    return RunRecords(Path("runs/x"), {"command": shlex.split(command), **words, **facts}, 2, [])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (f"farandole run -np 2 -- {SCRIPT}", f"farandole run -np 2 --set codec=int8 -- {SCRIPT}"),
        (f"farandole run -np 2 {SCRIPT}", f"farandole run -np 2 --set codec=int8 {SCRIPT}"),
        ("farandole run train.py --lr 0.1", "farandole run --set codec=int8 train.py --lr 0.1"),
        (
            f"farandole run --run-dir runs/a --set codec=bf16 --set accumulate=2 --no-bind -- {SCRIPT}",
            f"farandole run --set accumulate=2 --no-bind --set codec=int8 -- {SCRIPT}",
        ),
        (
            f"farandole emulate --hosts 2 --rate 200mbit -- {SCRIPT}",
            f"farandole emulate --hosts 2 --rate 200mbit --set codec=int8 -- {SCRIPT}",
        ),
        (
            f"farandole emulate --hosts 2 -- farandole run --set codec=bf16 -- {SCRIPT}",
            f"farandole emulate --hosts 2 -- farandole run --set codec=int8 -- {SCRIPT}",
        ),
        (None, f"farandole run -np 2 --set codec=int8 -- /usr/bin/{SCRIPT}"),
    ],
)
def test_a_plan_key_is_set_in_the_line_that_was_typed(typed: str | None, expected: str) -> None:
    assert command_with(of(typed), {"codec": "int8"}) == expected


def test_words_of_the_script_are_the_users_own() -> None:
    script = "python train.py --set codec=x --run-dir y -- -np 3"
    line = command_with(of(f"farandole run -np 2 -- {script}", script), {"codec": "int8"}, size=4)
    assert line == f"farandole run -np 4 --set codec=int8 -- {script}"


def test_a_flag_is_left_out_and_the_line_is_one_that_run_takes() -> None:
    line = command_with(of(f"farandole run -n 8 --no-bind -- {SCRIPT}"), size=2, without=("--no-bind",))
    assert line == f"farandole run -np 2 -- {SCRIPT}"
    read = make_parser().parse_args(shlex.split(line)[2:])
    assert (read.size, read.command[-3:]) == (2, ["train.py", "--lr", "0.1"])
