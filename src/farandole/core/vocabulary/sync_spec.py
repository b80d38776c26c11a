"""When replicas agree: what the plan's key `sync` says, and at which steps it makes ranks meet.

Names follow the papers: local SGD (Stich 1805.09767), post-local SGD (Lin 1808.07217), DiLoCo (Douillard
2311.08105, algorithm 1) and its streaming form (Douillard 2501.18512). A bound on staleness is that of stale
synchronous parallel (Ho 2013).

>>> SyncSpec.parse("diloco:H=50").momentum
0.9
>>> SyncSpec.parse("local:H=4,fragments=2").sends(6)
[0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from .codec_spec import NONE
from .errors import PlanError
from .text import did_you_mean

EVERY_STEP: Final = "every_step"
MEASURED: Final = "auto"
"""Begins with each step, and chooses by what was measured: see `sync.local_steps`."""
MEASURED_CODEC: Final = "int4"
"""What its local steps send: four bits lose next to nothing of what ranks changed (Douillard 2501.18512)."""
DEFAULT_STEPS: Final = 30
SERVER: Final = "server"
ASYNC: Final = "async"
"""Servers hold the parameters: with a bound on staleness, and without one."""
_OF_SERVERS: Final = (SERVER, ASYNC)
_DEFAULT_SNAPSHOT_SECONDS = 30.0
_DEFAULT_FIRST, _DEFAULT_FRAGMENTS, _DEFAULT_OVERLAP = 300, 5, 5


@dataclass(frozen=True)
class SyncSpec:
    """What `sync` says. Between two meetings each rank trains on its own."""

    name: str = EVERY_STEP
    steps: int = 1
    """H: optimizer steps of a rank between two meetings over the same parameter."""
    outer_lr: float = 1.0
    """Learning rate of the outer step, which applies the mean change of the ranks."""
    momentum: float = 0.0
    """Momentum of the outer step."""
    nesterov: bool = True
    """Whether it is Nesterov's; else heavy ball."""
    first: int = 0
    """Steps at the begin of a training with an exchange of gradients in each."""
    fragments: int = 1
    """Parts of the model, which meet at different steps."""
    overlap: int = 0
    """Steps that go on while a part is on its way."""

    staleness: int | None = None
    """With servers: how many steps ranks may be apart; None: any number."""
    servers: int = 0
    """With servers: how many; 0: one on each host."""
    snapshot_seconds: float = 0.0
    """With servers: between two snapshots of one; 0: only where the ranks need one."""

    @property
    def is_server(self) -> bool:
        """Whether servers hold the parameters."""
        return self.name in _OF_SERVERS

    @property
    def is_every_step(self) -> bool:
        """Whether gradients meet in every step, and the keys above say nothing."""
        return self.name == EVERY_STEP

    @property
    def exchanges_gradients(self) -> bool:
        """Whether ranks exchange gradients at the begin of a training, or always."""
        return self.name in (EVERY_STEP, MEASURED) or self.first > 0

    @property
    def is_plain_mean(self) -> bool:
        """Whether an outer step gives the mean of the ranks' parameters."""
        return self.outer_lr == 1.0 and self.momentum == 0.0

    def codec(self, of_plan: str) -> str:
        """Return the codec of changes: the plan's; "streaming" has "int4" where the plan has none."""
        return "int4" if self.name == "streaming" and of_plan == NONE else of_plan

    def sends(self, step: int) -> list[int]:
        """Return the fragments that are sent after local step `step`, which counts from 1."""
        apart = self.steps // self.fragments
        return [part for part in range(self.fragments) if step % self.steps == (part + 1) * apart % self.steps]

    def to_text(self) -> str:
        """Return the shortest text that `parse` reads back as this.

        >>> SyncSpec.parse("diloco:momentum=0.9,H=60").to_text()
        'diloco:H=60'
        """
        values = {key: getattr(self, option.field) for key, option in _OPTIONS.items()}
        changed = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in values.items()
            if value != getattr(PRESETS[self.name], _OPTIONS[key].field)
        ]
        return self.name + (":" + ",".join(changed) if changed else "")

    @classmethod
    def parse(cls, text: str) -> SyncSpec:
        """Read the key; raise `PlanError` naming the value, what was expected and the nearest name."""
        name, colon, rest = text.strip().partition(":")
        if name not in PRESETS:
            raise PlanError(f'plan: sync = "{text}": unknown {name!r}', remedy=did_you_mean(name, PRESETS))
        if name in (EVERY_STEP, MEASURED) and colon:
            raise PlanError(f'plan: sync = "{text}": {name} has no options', remedy="leave them out")
        given = _read_options(text, name, rest)
        spec = replace(PRESETS[name], **given)
        if spec.steps % spec.fragments:
            raise PlanError(
                f'plan: sync = "{text}": H = {spec.steps} is no multiple of fragments = {spec.fragments}',
                remedy=f"set H = {-(-spec.steps // spec.fragments) * spec.fragments}, or other fragments",
            )
        if spec.overlap >= spec.steps and spec.overlap:
            raise PlanError(
                f'plan: sync = "{text}": overlap = {spec.overlap}, but parts go again after H = {spec.steps}',
                remedy=f"set overlap below {spec.steps}",
            )
        return spec


class _Option(NamedTuple):
    field: str
    read: Callable[[str], Any]
    fits: Callable[[Any], bool]
    expected: str


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_OPTIONS: Final[Mapping[str, _Option]] = {
    "H": _Option("steps", int, lambda value: value >= 1, "a number of steps from 1"),
    "outer_lr": _Option("outer_lr", float, lambda value: 0 < value <= 10, "a number above 0, at most 10"),
    "momentum": _Option("momentum", float, lambda value: 0 <= value < 1, "a number from 0, below 1"),
    "nesterov": _Option("nesterov", _boolean, lambda value: True, "true or false"),
    "first": _Option("first", int, lambda value: value >= 0, "a number of steps from 0"),
    "fragments": _Option("fragments", int, lambda value: value >= 1, "a number of parts from 1"),
    "overlap": _Option("overlap", int, lambda value: value >= 0, "a number of steps from 0"),
    "staleness": _Option("staleness", int, lambda value: value >= 0, "a number of steps from 0"),
    "servers": _Option("servers", int, lambda value: value >= 1, "a number of servers from 1, at most one a rank"),
    "snapshot_seconds": _Option(
        "snapshot_seconds", float, lambda value: 0 <= value < math.inf, "a number of seconds from 0"
    ),
}
_SERVER_OPTIONS: Final = ("staleness", "servers", "snapshot_seconds")

PRESETS: Final[Mapping[str, SyncSpec]] = {
    EVERY_STEP: SyncSpec(),
    MEASURED: SyncSpec(MEASURED),
    "local": SyncSpec("local", DEFAULT_STEPS),
    "post_local": SyncSpec("post_local", DEFAULT_STEPS, first=_DEFAULT_FIRST),
    "diloco": SyncSpec("diloco", DEFAULT_STEPS, outer_lr=0.7, momentum=0.9),
    "streaming": SyncSpec(
        "streaming", DEFAULT_STEPS, outer_lr=0.7, momentum=0.9, fragments=_DEFAULT_FRAGMENTS,
        overlap=_DEFAULT_OVERLAP,
    ),
    SERVER: SyncSpec(SERVER, staleness=0, snapshot_seconds=_DEFAULT_SNAPSHOT_SECONDS),
    ASYNC: SyncSpec(ASYNC, staleness=None, snapshot_seconds=_DEFAULT_SNAPSHOT_SECONDS),
}  # fmt: skip
"""By name, what is not said otherwise."""


def _read_options(text: str, name: str, rest: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in rest.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise PlanError(f'plan: sync = "{text}": expected key=value, got {word!r}')
        if key not in _OPTIONS:
            raise PlanError(f'plan: sync = "{text}": no option {key!r}', remedy=did_you_mean(key, _OPTIONS))
        option = _OPTIONS[key]
        if (key in _SERVER_OPTIONS) != (name in _OF_SERVERS):
            others = [each for each in _OPTIONS if (each in _SERVER_OPTIONS) == (name in _OF_SERVERS)]
            raise PlanError(f'plan: sync = "{text}": {name} has no {key}', remedy=f"it has {', '.join(others)}")
        if key == "staleness" and name == ASYNC:
            raise PlanError(f'plan: sync = "{text}": {ASYNC} has no bound', remedy=f"write {SERVER}:{key}={value}")
        if option.field in given:
            raise PlanError(f'plan: sync = "{text}": {key} is given twice')
        try:
            found = option.read(value)
        except (ValueError, KeyError):
            raise PlanError(f'plan: sync = "{text}": {key} = {value!r}, expected {option.expected}') from None
        if not option.fits(found):
            raise PlanError(f'plan: sync = "{text}": {key} = {value}, expected {option.expected}')
        given[option.field] = found
    return given
