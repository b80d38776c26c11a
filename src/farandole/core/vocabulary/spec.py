"""The plan: everything that decides how a run is spread, in one frozen, versioned value.

A plan is written by a user or a planner, read by ``farandole run --plan`` and
`fd.distribute`, stored with every run and compared with ``==``. There is no second way to
configure a run. Keys appear here when they have an effect, not before.

>>> Plan.from_mapping({"bucket_bytes": "4MiB"}, where="example").bucket_bytes
4194304
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .codec_spec import NONE, CodecSpec
from .config import build, read_mapping
from .errors import PlanError

PLAN_VERSION = 1
MOST_CONNECTIONS = 16
RouteName = Literal["flat", "shared", "hierarchical", "server", "sharded_server"]
_CONGESTION_CONTROL = re.compile(r"[a-z0-9_-]{1,15}")
"""Longer names Linux does not have."""


@dataclass(frozen=True)
class Plan:
    """The configuration of a run: how it is distributed over its ranks. Immutable; the defaults suit most runs.

    Each field is documented below; docs/plan.md has the same list. The constructor raises `PlanError` for values
    that are out of range or contradict each other.
    """

    version: int = PLAN_VERSION
    """Version of this format; a newer one is refused."""
    bucket_bytes: int = 4 * 2**20
    """Gradients are exchanged in buckets of about this many bytes (a larger gradient is its own bucket)."""
    first_bucket_bytes: int = 2**20
    """Bytes of the first bucket, which is smaller so that the exchange starts early in backward."""
    accumulate: int = 1
    """Backward passes to accumulate on each rank before gradients are exchanged."""
    clip_norm: float | None = None
    """Clip the mean gradient to this global 2-norm before each optimizer step."""
    sync_batch_norm: bool = False
    """Whether BatchNorm layers use the statistics of the global batch."""
    buffers: Literal["mean", "local"] = "mean"
    """Buffers after a step: "mean" of running statistics (other buffers that change: rank 0's), or "local"."""
    codec: str = NONE
    """Compression of gradients, e.g. "int8", "topk:0.01" or "powersgd:4"."""
    lossy: bool = False
    """Whether codec "auto" may choose lossy codecs (their residual is sent later)."""
    codec_for: Mapping[str, str] = field(default_factory=dict)
    """Codecs of the parameters whose names match a pattern such as "*.embedding.*"; the last match counts."""
    route: Literal["auto"] | RouteName = "auto"
    """Route of the buckets: "auto" uses shared memory inside a host if possible, "flat" never does."""
    ranks_per_switch: int = 0
    """Number of consecutive ranks behind one switch, which reduce among themselves first. 0: not configured."""
    switch_of: Mapping[str, str] = field(default_factory=dict)
    """The same by host: the switch of hosts that match a pattern such as "rack1-*"; the last match counts."""
    connections: int = 1
    """TCP connections between two ranks, used round-robin by messages; codec "auto" tries 2 and 4 if this is 1."""
    congestion_control: str = ""
    """TCP congestion control of messages, e.g. "cubic" on hosts with "bbr". Empty: the host's default."""
    nonfinite: Literal["propagate", "skip", "raise"] = "propagate"
    """If a gradient with a codec has NaN or infinity: NaN on all ranks, skip the step, or raise."""
    timeout_seconds: float = 600.0
    """How long a rank waits for the others before it raises, in seconds."""
    stall_seconds: float = 10.0
    """Say which rank is where after this many seconds without a step, or 20 median steps if longer. 0: never."""

    def __post_init__(self) -> None:
        if self.version > PLAN_VERSION:
            raise PlanError(
                f"plan version {self.version} is newer than {PLAN_VERSION}, the newest this farandole reads",
                remedy="upgrade with: pip install --upgrade farandole",
            )
        for name, least in (
            ("version", 1),
            ("bucket_bytes", 1),
            ("first_bucket_bytes", 1),
            ("accumulate", 1),
            ("connections", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise PlanError(f"plan: {name} = {value}, expected at least {least}")
        if self.ranks_per_switch < 0 or self.ranks_per_switch == 1:
            raise PlanError(f"plan: ranks_per_switch = {self.ranks_per_switch}, expected 0, or 2 and more")
        if self.ranks_per_switch and self.switch_of:
            raise PlanError("plan: ranks_per_switch and switch_of both say who is behind which switch; drop one")
        if (self.ranks_per_switch or self.switch_of) and self.route not in ("auto", "hierarchical"):
            raise PlanError(
                f"plan: route = {self.route!r} makes no use of switches",
                remedy='leave ranks_per_switch and switch_of out, or use route "hierarchical"',
            )
        if self.connections > MOST_CONNECTIONS:
            raise PlanError(f"plan: connections = {self.connections}, expected at most {MOST_CONNECTIONS}")
        if self.congestion_control and not _CONGESTION_CONTROL.fullmatch(self.congestion_control):
            raise PlanError(
                f"plan: congestion_control = {self.congestion_control!r}, expected a name such as cubic or bbr"
            )
        if self.clip_norm is not None and not (0 < self.clip_norm < math.inf):
            raise PlanError(f"plan: clip_norm = {self.clip_norm}, expected a positive number or none")
        for where, codec in (
            ("plan: codec", self.codec),
            *((f"plan: codec_for.{p}", c) for p, c in self.codec_for.items()),
        ):
            spec = CodecSpec.parse(codec, where=where)
            if self.route in ("server", "sharded_server") and not spec.is_exact:
                raise PlanError(
                    f"{where} = {codec!r}, but route = {self.route!r} carries gradients as they are",
                    remedy='use codec none, or route "auto"',
                )
        if not (0 < self.timeout_seconds < math.inf):
            raise PlanError(f"plan: timeout_seconds = {self.timeout_seconds}, expected a positive number")
        if not (0 <= self.stall_seconds < math.inf):
            raise PlanError(
                f"plan: stall_seconds = {self.stall_seconds}, expected a number from 0, or 0 for never"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, where: str) -> Plan:
        """Build a plan from keys and values; raise `PlanError` on unknown keys and wrong types."""
        # A newer plan may well have keys we do not know: its version is the answer, not the first such key.
        version = values.get("version", PLAN_VERSION)
        if isinstance(version, int) and version > PLAN_VERSION:
            return cls(version=version)
        return build(cls, values, where=where, error=PlanError)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan from a ``.toml`` or ``.json`` file."""
        return cls.from_mapping(read_mapping(Path(path), error=PlanError), where=str(path))

    def to_mapping(self) -> dict[str, Any]:
        """Return all keys and values; `from_mapping` gives the same plan back."""
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """Return the plan as TOML. A key whose value is none is left out."""
        lines = [f"{name} = {_to_toml(value)}" for name, value in self.to_mapping().items() if value is not None]
        return "\n".join(lines) + "\n"

    def differences(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Return the keys in which two plans differ, with both values."""
        mine, theirs = self.to_mapping(), other.to_mapping()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def _to_toml(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(key)} = {json.dumps(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return json.dumps(value)
