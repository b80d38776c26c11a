"""One rank of ``farandole test --device``: says how far it has come, and the result, as lines of JSON.

A world of one makes the checks of one process, and says how many devices there are; several make those of the
engine. Exceptions end the job, whose launcher names the rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

import farandole as fd

from ...comm.device.tested import keep_tested
from ...core.environ.nccl import share_device
from ...core.vocabulary.errors import ConfigError
from .codecs_check import check_alone
from .device_test import SHARED_KINDS
from .engine_check import check_engine, check_named
from .subject import CPU, Subject, find_devices


def main() -> None:
    """Check it, and say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--keep", action="store_true", help="all checks before have passed: keep it if these do")
    options = parser.parse_args()
    try:
        devices = find_devices(options.kind)
    except ConfigError as problem:
        _say({"result": {"refused": problem.message, "remedy": problem.remedy}})
        return
    share_device(devices)
    world = fd.init(device=None if options.kind == "cuda" else CPU)
    device = world.device if options.kind in SHARED_KINDS else torch.device(options.kind, world.local_rank)
    torch.manual_seed(0)
    subject = Subject(device)
    if world.size == 1:
        _say({"progress": "codecs in lock step"})
        checks = check_alone(subject)
    else:
        checks = [check_engine(subject, world, scaled=scaled) for scaled in (False, True)]
        checks.append(check_named(subject, world))
    if world.rank == 0:
        passed = all(each.passed is not False for each in checks)
        if passed and options.keep and device != CPU:  # not of codecs alone
            keep_tested(device)
        _say({"result": {"devices": devices, "ranks": world.size, "checks": [vars(each) for each in checks]}})
    fd.shutdown()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
