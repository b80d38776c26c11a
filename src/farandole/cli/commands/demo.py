"""``farandole demo``: the whole story on this machine, in about a minute."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import did_you_mean
from ..main import parser

DATASETS = {"text": False, "fashion-mnist": True}
"""Name, and whether it needs a directory."""

_EXAMPLES = """\
  farandole demo
  farandole demo --dataset fashion-mnist /usr/share/datasets/fashion-mnist
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "demo",
        "Train a real model by one process and then by two, on the same samples; compare; verify; report.",
        _EXAMPLES,
    )
    made.add_argument(
        "--dataset", nargs="+", default=["text"], metavar=("NAME", "DIR"),
        help="text (Python's own standard library; the default), or fashion-mnist DIR",
    )  # fmt: skip
    made.add_argument("--steps", type=int, metavar="N", help="optimizer steps of each run")
    made.add_argument("--run-dir", metavar="DIR", help="where to keep the runs (default: runs/TIME-demo-NAME)")
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    name, directory = _dataset(options.dataset)
    if options.steps is not None and options.steps < 4:
        raise ConfigError(f"--steps {options.steps}: expected at least 4")
    from ...bench.demo import run_demo

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    result = run_demo(name, directory, steps=options.steps, run_directory=options.run_dir, say=say)
    print(json.dumps(result.to_mapping()) if options.json else "\n" + result.text)
    return result.exit_code


def _dataset(words: Sequence[str]) -> tuple[str, Path | None]:
    name, *rest = words
    if name not in DATASETS:
        raise ConfigError(f"--dataset {name}: unknown data set", remedy=did_you_mean(name, DATASETS))
    if len(rest) > 1 or (rest and not DATASETS[name]):
        raise ConfigError(f"--dataset {' '.join(words)}: too many words", remedy="NAME, or NAME DIR")
    if DATASETS[name] and not rest:
        raise ConfigError(f"--dataset {name} needs the directory of its files", remedy=f"--dataset {name} DIR")
    directory = Path(rest[0]) if rest else None
    if directory is not None and not directory.is_dir():
        raise ConfigError(
            f"--dataset {name}: {directory} is not a directory", remedy="apt-get install dataset-fashion-mnist"
        )
    return name, directory
