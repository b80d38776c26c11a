"""The command-line flags: a list that changes on purpose, together with the documentation."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser

from farandole.cli.main import COMMANDS

FLAGS = {
    "demo": ["--dataset", "--json", "--run-dir", "--steps"],
    "bench": [],
    "bench codecs": ["--codecs", "--json", "--rounds"],
    "bench collectives": [
        "--hosts", "--json", "--link", "--operations", "--rate", "--rounds", "--routes", "--sizes", "--slots",
    ],
    "bench step": [
        "--batch", "--contenders", "--hosts", "--json", "--link", "--model", "--rate", "--rounds", "--slots",
    ],
    "emulate": ["--hosts", "--json", "--latency", "--rate", "--rate-between", "--script", "--slots"],
    "report": ["--baseline", "--json", "--output", "-o"],
    "run": [
        "--baseline", "--dry-run", "--json", "--no-bind", "--np", "--plan", "--quiet", "--run-dir", "--set",
        "-n", "-np",
    ],
    "timeline": ["--json", "--output", "-o"],
    "verify": ["--json", "--no-bind", "--np", "--plan", "--run-dir", "--set", "--steps", "-n", "-np"],
}  # fmt: skip


def parsers() -> dict[str, ArgumentParser]:
    """Return the parser of every command, and of the commands of ``bench``."""
    found = {}
    for command in COMMANDS:
        module = importlib.import_module(f"farandole.cli.{command}")
        found[command] = module.make_parser()
        for name, (make_parser, _) in getattr(module, "BENCHMARKS", {}).items():
            found[f"{command} {name}"] = make_parser()
    return found


def test_flags() -> None:
    found = {}
    for command, parser in parsers().items():
        options = parser._option_string_actions
        found[command] = sorted(set(options) - {"-h", "--help"})
        for action in options.values():
            assert action.help, f"{command} {action.option_strings}: no help"
    assert found == FLAGS
