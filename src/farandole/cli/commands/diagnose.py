"""``farandole diagnose``: where a run's time goes, what it costs and how to fix it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ..main import parser
from ..options.files import NEWEST, run_or_newest

OVER = 3
"""Exit code when a finding costs more than ``--fail-over`` allows."""

_EXAMPLES = """\
  farandole diagnose                              # the newest run in runs/
  farandole diagnose runs/20260101-120000-train
  farandole diagnose runs/first --json
  farandole diagnose runs/first --measure-codecs
  farandole diagnose runs/first --batch-size
  farandole diagnose runs/first --fail-over 10    # exit code 3 when a finding costs more than 10%
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser("diagnose", "Show where a run's time goes, what each fault costs, and the fix.", _EXAMPLES)
    made.add_argument("run", metavar="RUN", nargs="?", help=f"run directory {NEWEST}")
    made.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    made.add_argument(
        "--measure-codecs", action="store_true",
        help="measure codecs on this host, and include their CPU time in predicted gains",
    )  # fmt: skip
    made.add_argument(
        "--batch-size", action="store_true",
        help="print the global batch at which communication hides, by codec, and which one reaches a loss first",
    )  # fmt: skip
    made.add_argument(
        "--critical-batch", type=float, metavar="N",
        help="with --batch-size: samples of the critical batch (default: what fd.noise_scale measured in it)",
    )  # fmt: skip
    made.add_argument(
        "--fail-over", metavar="PCT", help="end with exit code 3 when a finding costs more than PCT%% of a step"
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    limit = None if options.fail_over is None else _read_percent(options.fail_over)
    run = run_or_newest(options.run)
    if options.batch_size:
        return _batch_size(run, options)
    if options.critical_batch is not None:
        raise ConfigError("--critical-batch is for --batch-size", remedy="add --batch-size, or leave it out")
    from ...observe.diagnose import diagnose, to_text

    diagnosis = diagnose(run)
    if options.measure_codecs and diagnosis.size > 1:
        diagnosis = diagnose(run, _measured(diagnosis.size))
    print(json.dumps(diagnosis.to_mapping()) if options.json else to_text(diagnosis))
    return OVER if limit is not None and 100 * diagnosis.worst_share() > limit else 0


def _batch_size(run: Path, options: argparse.Namespace) -> int:
    """Print which batch the link of a run asks for."""
    if options.fail_over is not None:
        raise ConfigError("--fail-over has no effect with --batch-size", remedy="leave one out")
    from ...observe.diagnose import measured_step
    from ...plan.batch_advice import advise_run, to_text

    step = measured_step(run)
    if options.measure_codecs:
        step = measured_step(run, _measured(step.ranks))
    advice = advise_run(step, critical_batch=options.critical_batch)
    print(json.dumps(advice.to_mapping()) if options.json else to_text(advice))
    return 0


def _measured(size: int) -> dict[str, float]:
    from ...comm.autotune.probe import measure_codecs
    from ...observe.diagnose.loader_fixes import PREDICTED

    return {name: speed.seconds_per_byte for name, speed in measure_codecs(PREDICTED, size).items()}


def _read_percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise ConfigError(f"--fail-over {text}: expected per cent of a step from 0 to 100")
    return value
