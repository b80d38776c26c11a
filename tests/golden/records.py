"""Records of golden trainings: where they were made, and how a new run may differ from them.

[Note: one kind of machine] The order in which torch and its libraries add depends on the torch version, the
architecture, the instructions torch uses and, in MKL, the CPU's vendor. Where these equal the recorded ones,
losses must be equal to the last bit. Elsewhere rounding may differ: with ATEN_CPU_CAPABILITY=default, avx2 and
MKL_CBWR=COMPATIBLE losses differed by up to 2e-7 of themselves without a codec. With int8 it was up to 2e-5: a
gradient that is rounded otherwise can be sent as the next level. Bytes must be equal everywhere.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.golden.trainings import TRAININGS, Measured

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Machine:
    """What the last bit of a sum depends on."""

    torch: str
    architecture: str
    cpu_capability: str
    cpu_vendor: str


def this_machine() -> Machine:
    """Return the kind of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    vendor = next((line.partition(": ")[2] for line in lines if line.startswith("vendor_id")), "unknown")
    return Machine(torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability(), vendor)


def write(name: str, measured: Measured) -> None:
    """Replace the record of a training."""
    record = {"machine": asdict(this_machine()), **asdict(measured)}
    # One number a line, each in the fewest digits that give the same bits when read again
    (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")


def read(name: str) -> tuple[Machine, Measured]:
    """Return the record of a training, and the machine it is of."""
    record = json.loads((FOLDER / f"{name}.json").read_text())
    return Machine(**record.pop("machine")), Measured(**record)


def allowed(name: str, machine: Machine) -> float:
    """Return by how much of itself a loss may differ here from one that was recorded on `machine`."""
    return 0.0 if machine == this_machine() else TRAININGS[name].tolerance


def differences(recorded: Measured, measured: Measured, *, tolerance: float) -> list[str]:
    """Return one line for each value that is not what the record says; `tolerance` is for losses."""
    found = [
        f"{what} {i}: {new!r}, recorded {old!r}"
        for what, before, now in (
            ("sent_bytes of rank", recorded.sent_bytes, measured.sent_bytes),
            ("tcp_bytes of rank", recorded.tcp_bytes, measured.tcp_bytes),
        )
        for i, (old, new) in enumerate(_pairs(before, now))
        if old != new
    ]
    return found + [
        f"loss of step {step}: {new!r}, recorded {old!r}: {new / old - 1:+.1e}, allowed {tolerance:g}"
        for step, (old, new) in enumerate(_pairs(recorded.losses, measured.losses))
        if not math.isclose(old, new, rel_tol=tolerance)
    ]


def _pairs(before: Sequence[float], now: Sequence[float]) -> list[tuple[float, float]]:
    assert len(before) == len(now), f"{len(now)} values, recorded {len(before)}: regenerate after a change of size"
    return list(zip(before, now, strict=True))
