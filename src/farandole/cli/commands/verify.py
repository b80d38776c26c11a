"""``farandole verify``: run a script for a few steps and check ranks, samples, gradients and loss."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.env import inherited_environment
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ...core.vocabulary.run_files import VERIFY
from ...launch.output import OutputStyle
from ...launch.start.placing import place_job
from ...launch.start.request import VerifyOptions
from ...launch.start.start import start_job
from ..main import parser
from ..options.job_options import add_job_options, read_request

_EXAMPLES = """\
  farandole verify -np 2 -- python train.py
  farandole verify -np 2 --deep -- python train.py
  farandole verify -np 2 --as-horovod -- python keras_with_horovod.py
  farandole verify -np 4 --steps 10 --json -- python train.py --lr 0.1
"""
_MARKS = {True: "ok", False: "FAIL", None: "not checked"}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "verify", "Run a script for a few steps, stop it, and say whether its ranks are in order.", _EXAMPLES
    )
    made.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps to check (default: 5)")
    made.add_argument(
        "--deep", action="store_true",
        help="also compute each gradient a second time, without the exchange, and compare (slower)",
    )  # fmt: skip
    made.add_argument(
        "--as-horovod", action="store_true", help="resolve the script's `import horovod` to farandole.horovod"
    )
    add_job_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 all in order, 1 a check failed, 2 bad usage."""
    options = make_parser().parse_args(arguments)
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps}: expected at least 1")
    request = read_request(options, starter="verify")
    environment = dict(request.environment)
    if options.as_horovod:
        from ...horovod.as_horovod import horovod_environment

        environment |= horovod_environment(inherited_environment())
    label, verify = f"verify-{request.label}", VerifyOptions(options.steps, options.deep)
    request = replace(request, label=label, verify=verify, environment=environment)
    request = replace(request, style=OutputStyle(warnings_once=True))
    outcome, directory = start_job(place_job(request))
    if outcome.exit_code:
        return outcome.exit_code
    result = _read(directory)
    if options.json:
        print(json.dumps({"run_directory": str(directory), **result}))
    else:
        print(_page(result))
    return 0 if result["passed"] else 1


def _read(directory: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads((directory / VERIFY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FarandoleError(
            "the script ended without fd.init, so there was nothing to verify",
            remedy="call farandole.init() and farandole.distribute(model, optimizer) in it",
        ) from None
    return result


def _page(result: dict[str, Any]) -> str:
    lines = []
    for check in result["checks"]:
        lines.append(f"{check['word'] or _MARKS[check['passed']]:>11}  {check['name']}: {check['answer']}")
        if check["remedy"] and (check["word"] or check["passed"] is False):
            lines.append(f"{'':>11}  -> {check['remedy']}")
    failed = sum(check["passed"] is False for check in result["checks"])
    notes = sum(check["passed"] is None or bool(check["word"]) for check in result["checks"])
    order = "All in order." if not notes else f"In order, but for {notes} thing{'s' * (notes > 1)} to know."
    lines.append(order if not failed else f"{failed} check{'s' * (failed > 1)} failed.")
    return "\n".join(lines)
