"""The command-line flags: a list that changes on purpose, together with the documentation."""

from __future__ import annotations

import importlib

from farandole.cli.main import COMMANDS

FLAGS = {
    "demo": ["--dataset", "--json", "--run-dir", "--steps"],
    "emulate": ["--hosts", "--json", "--latency", "--rate", "--rate-between", "--script", "--slots"],
    "report": ["--baseline", "--json", "--output", "-o"],
    "run": [
        "--baseline", "--dry-run", "--json", "--no-bind", "--np", "--plan", "--quiet", "--run-dir", "--set",
        "-n", "-np",
    ],
    "verify": ["--json", "--no-bind", "--np", "--plan", "--run-dir", "--set", "--steps", "-n", "-np"],
}  # fmt: skip


def test_flags() -> None:
    found = {}
    for command in COMMANDS:
        options = importlib.import_module(f"farandole.cli.{command}").make_parser()._option_string_actions
        found[command] = sorted(set(options) - {"-h", "--help"})
        for action in options.values():
            assert action.help, f"{command} {action.option_strings}: no help"
    assert found == FLAGS
