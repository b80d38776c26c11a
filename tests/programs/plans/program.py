"""What a random program of plans is: plain data, the same on every rank and in the process that judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEGREES = ("data", "shard", "tensor", "pipeline", "expert", "context")
TOKENS = 8
"""Of a sequence."""
BATCH = 16
"""Samples of a step, on all ranks together."""
LATE_STEP = 1
"""From this step on late parameters train."""


@dataclass(frozen=True)
class Layout:
    """Keys of a plan, and the world that it is for."""

    ranks: int = 2
    hosts: int = 1
    """On so many hosts the ranks believe to be."""
    keys: Mapping[str, Any] = field(default_factory=dict)

    def degree(self, name: str) -> int:
        """Return a degree of the mesh."""
        if name == "data" and "data" not in self.keys:
            others = 1
            for each in DEGREES[1:]:
                others *= self.degree(each)
            return self.ranks // others
        return int(self.keys.get(name, 1))

    @property
    def samples(self) -> int:
        """How many parts a batch has: ranks with samples of their own."""
        return self.degree("data") * self.degree("shard") * self.degree("expert")

    @property
    def zero(self) -> int:
        """The stage."""
        return int(self.keys.get("zero", 0))

    @property
    def is_delayed(self) -> bool:
        """Whether gradients come one step late."""
        return self.keys.get("weight_versions") == 2

    @property
    def sync(self) -> str:
        """When ranks meet."""
        return str(self.keys.get("sync", "every_step"))


@dataclass(frozen=True)
class PlanProgram:
    """One training program. The defaults are the simplest one."""

    seed: int
    kind: str = "exact"
    """How it is judged: "exact", or one of `tests.programs.plans.kinds`."""
    first: Layout = field(default_factory=Layout)
    then: Layout | None = None
    """Where the training goes on from a checkpoint."""
    save_at: int = 2
    steps: int = 3
    width: int = 8
    layers: int = 2
    heads: int = 2
    key_heads: int = 2
    mix: str = "sdpa"
    """What mixes tokens: "sdpa", "mha" (torch's module), "encoder" (torch's whole layer) or "none"."""
    feed: str = "gelu"
    """"gelu", "gated", or "experts" in every other block."""
    experts: int = 4
    top_k: int = 2
    capacity: float | None = None
    shared: int = 0
    """Inner width of the expert that sees every token."""
    norm: str = "layer"
    head_norms: bool = False
    zero_branches: bool = False
    """The last layer of each branch begins at zero."""
    causal: bool = True
    bias: bool = True
    places: str = "none"
    """Embedded positions: "none", "input" or "inside" of the model."""
    scale: bool = False
    """Parameters that no module has but the model itself."""
    buffer: bool = False
    unused: bool = False
    tied: bool = False
    twice: bool = False
    """The first block runs twice."""
    far: bool = False
    """A connection from the first block's input to the last one's output."""
    warms: bool = False
    """The model computes with a number that the loop changes in each step."""
    skip: str = "none"
    """Blocks that are left out: "none", by "step" on all ranks, or by "rank"."""
    frozen: str = ""
    """A pattern of parameters that never train."""
    late: str = ""
    """A pattern of parameters that train from `LATE_STEP` on."""
    late_by: str = "loop"
    """Who lets them: the "loop" or the "plan"."""
    words: int = 13
    loss: str = "mean"
    """"mean", "ignore" or "smooth" (some targets do not count), "classes" (weights), "logits" (their size too)."""
    penalty: float = 0.0
    """On the squares of all parameters, in the loss."""
    balance: float = 0.0
    z: float = 0.0
    optimizer: str = "sgd"
    groups: int = 1
    optimizers: int = 1
    scheduler: str = "none"
    early: bool = True
    """The scheduler is made before `fd.distribute`."""
    clip: str = "none"
    """"none", by the "loop" or by the "plan"."""
    loop: str = "plain"
    """"plain", or "step": by `fd.step`."""
    passes: int = 1
    """Backward passes a step."""
    accumulate: str = "none"
    """Who knows of them: "none", the "plan", or the "loop" by `fd.accumulate`."""
    ragged: bool = False
    """Ranks have unequal parts of a batch."""
    evaluate: bool = False
    adapters: bool = False
    """Blocks have low-rank adapters, and only these and the output layer train."""
    loader: bool = False
    """Batches come from a loader of `fd.shard`; the last one is short."""
    dropout: float = 0.0
    single: bool = False
    """The model is in float32."""

    def changes(self) -> dict[str, Any]:
        """Return the fields that are not those of the simplest program, for a person."""
        found = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name in ("first", "then"):
                if value is not None:
                    found[each.name] = " ".join(f"{key}={word}" for key, word in _flat(value).items())
            elif each.name == "seed" or value != each.default:
                found[each.name] = value
        return found

    @property
    def routes(self) -> bool:
        """Whether losses of routers are added."""
        return bool(self.balance or self.z)

    def trains_late(self, step: int) -> bool:
        """Return whether late parameters train in a step."""
        return step >= LATE_STEP

    @property
    def layouts(self) -> list[Layout]:
        """One or two."""
        return [self.first] if self.then is None else [self.first, self.then]

    def span(self, number: int) -> tuple[int, int]:
        """Return the first step of a layout, and that after its last one."""
        if self.then is None:
            return 0, self.steps
        return (self.save_at, self.steps) if number else (0, self.save_at)

    def layout_at(self, step: int) -> Layout:
        """Return the layout of a step."""
        return self.first if self.then is None or step < self.save_at else self.then


def _flat(layout: Layout) -> dict[str, Any]:
    hosts = {"hosts": layout.hosts} if layout.hosts > 1 else {}
    return {"ranks": layout.ranks, **hosts, **layout.keys}


def changed(program: PlanProgram, changes: Mapping[str, Any]) -> PlanProgram:
    """Return `program` with other values: ``layers``, ``first.ranks``, ``then.zero``, or ``then`` None."""
    for name, value in changes.items():
        which, _, key = name.partition(".")
        if not key:
            program = dataclasses.replace(program, **{which: value})
            continue
        layout = getattr(program, which) or Layout()
        if key in ("ranks", "hosts"):
            layout = dataclasses.replace(layout, **{key: value})
        else:
            keys = {each: word for each, word in {**layout.keys, key: value}.items() if word is not None}
            layout = dataclasses.replace(layout, keys=keys)
        program = dataclasses.replace(program, **{which: layout})  # type: ignore[arg-type]
    return program
