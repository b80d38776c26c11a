"""The keys of a plan that say how gradients are made and travel, and that may change between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..vocabulary.spec import Plan, RouteName
from ..vocabulary.units import format_bytes


@dataclass(frozen=True)
class ExchangeKeys:
    """How gradients travel, and in how many passes they are made. The fields are keys of `Plan`; see `of_plan`."""

    bucket_bytes: int
    first_bucket_bytes: int
    codec: str
    route: RouteName
    connections: int
    micro_batches: int
    """Parts of a batch of `fd.step`; 1: it is not divided."""

    @classmethod
    def of_plan(cls, plan: Plan, route: RouteName) -> ExchangeKeys:
        """Return the keys of `plan`, in a world that chose `route`; a default number of micro-batches is 1."""
        parts = plan.micro_batches or 1
        return cls(plan.bucket_bytes, plan.first_bucket_bytes, plan.codec, route, plan.connections, parts)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ExchangeKeys:
        """Return what `to_mapping` was of. Raises TypeError or KeyError for anything else."""
        keys = cls(**values)
        for name, value in asdict(keys).items():
            kind = str if name in ("codec", "route") else int
            if type(value) is not kind:
                raise TypeError(f"{name} = {value!r} is no {kind.__name__}")
        return keys

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def on(self, plan: Plan) -> Plan:
        """Return `plan` with these keys. Raises `PlanError` where they contradict its others."""
        is_same = self.micro_batches == (plan.micro_batches or 1)
        return replace(
            plan, **{**asdict(self), "micro_batches": plan.micro_batches if is_same else self.micro_batches}
        )

    def to_text(self, other: ExchangeKeys | None = None) -> str:
        """Return the keys for people; with `other`, only those that are different there."""
        mine = asdict(self)
        names = [name for name in mine if other is None or mine[name] != getattr(other, name)]
        shown = {name: format_bytes(mine[name]) if name.endswith("_bytes") else str(mine[name]) for name in names}
        return ", ".join(f"{name} {value}" for name, value in shown.items()) or "unchanged"
