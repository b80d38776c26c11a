"""What the planner is asked for, checked before anything is searched."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from ...core.vocabulary.config import convert
from ...core.vocabulary.degrees import ORDER, REST
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.suggestions import did_you_mean
from ...core.vocabulary.sync_spec import EVERY_STEP

Goal = Literal["throughput", "memory", "cost", "time"]
GOALS: Final[tuple[Goal, ...]] = ("throughput", "memory", "cost", "time")
"""The most samples a second on all ranks; the least memory on all ranks; the least rank-seconds for a sample, and
the shortest step, both on as many ranks as that takes."""
FEWER_RANKS: Final[tuple[Goal, ...]] = ("cost", "time")
"""Goals for which fewer ranks than there are may be best."""
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-weights")
"""What `SearchRequest.precisions` may name; "bf16-weights": `bf16_parameters` too."""
_NO_PRECISIONS = {
    "fp8": "a model has layers of 8 bits from a library, such as torchao, and no plan changes layers into these",
    "tf32": (
        'a switch of torch for the whole process, torch.set_float32_matmul_precision("high"), and no key of a '
        "plan; predictions in fp32 are without it"
    ),
}
"""What is asked for, and no plan has."""
MOST_RANKS = 65536
MOST_SAMPLES = 2**20
"""Samples of a step for each rank that there is. At a tenth of a millisecond a sample, which is little for a model
that needs a plan, such a step takes 105 s; a larger number is most likely one of tokens, or a slip."""
LEAST_MEMORY_BYTES = 2**20
"""Bytes of a rank; fewer are a slip, such as a number without its unit."""
_NOT_FIXED = ("version",)


@dataclass(frozen=True)
class SearchRequest:
    """What is asked for. Raises `PlanError` for values that cannot be."""

    ranks: int
    """How many there are."""
    global_batch: int
    """Samples of one step of the optimizer, over all ranks."""
    goal: Goal = "throughput"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the plan that are given, with their values; see `parse_fixed`."""
    allow_lossy: bool = False
    """Whether codecs may lose something."""
    memory_bytes: int | None = None
    """What a rank may use; None: what the cluster says."""
    precisions: tuple[str, ...] = ("fp32",)
    """What may be chosen of `PRECISIONS`. Other than the user's own precision changes results."""
    effort: int = 3000
    """About how many plans are predicted, counted in plans without a pipeline; small spaces need fewer."""

    @property
    def choices(self) -> dict[str, Any]:
        """What is fixed and could be otherwise; a recipe says what layers are."""
        return {key: value for key, value in self.fixed.items() if key != "tensor_recipe"}

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise PlanError(f"--goal {self.goal}: no such goal", remedy=f"expected one of {', '.join(GOALS)}")
        for name, value, most in (
            ("ranks", self.ranks, MOST_RANKS), ("global batch", self.global_batch, None),
            ("effort", self.effort, None),
        ):  # fmt: skip
            if value < 1 or (most is not None and value > most):
                limit = f" and at most {most}" if most is not None else ""
                raise PlanError(f"{name} = {value}, expected at least 1{limit}")
        if self.global_batch > MOST_SAMPLES * self.ranks:
            raise PlanError(
                f"global batch = {self.global_batch}: {-(-self.global_batch // self.ranks)} samples of a step for "
                f"each of {self.ranks} ranks, expected at most {MOST_SAMPLES} ({MOST_SAMPLES * self.ranks} "
                "in all)",
                remedy="give the samples of one step: of a language model these are sequences, not tokens",
            )
        if self.memory_bytes is not None and self.memory_bytes < LEAST_MEMORY_BYTES:
            raise PlanError(
                f"memory = {self.memory_bytes} bytes of a rank, expected at least {LEAST_MEMORY_BYTES}",
                remedy="give it with its unit, such as 8GB or 8GiB",
            )
        for precision in self.precisions:
            if precision not in PRECISIONS:
                why = _NO_PRECISIONS.get(precision, "no such precision")
                expected = f"expected some of {', '.join(PRECISIONS)}"
                raise PlanError(f"--precision {precision}: {why}", remedy=expected)
        if self.fixed.get("weight_versions", 1) != 1:
            raise PlanError(
                f"--fix weight_versions={self.fixed['weight_versions']} changes what is trained (gradients of "
                "weights one step old), and plans are compared that train the same",
                remedy="set it in the plan that comes out, or with --set, and predict that plan",
            )
        if self.fixed.get("sync", EVERY_STEP) != EVERY_STEP:
            raise PlanError(
                f"--fix sync={self.fixed['sync']} changes what is trained, and compared plans train alike",
                remedy="set it in the plan that comes out, or with --set",
            )
        if not self.precisions:
            raise PlanError("no precision is allowed", remedy=f"name one of {', '.join(PRECISIONS)}")


def parse_fixed(settings: Iterable[str]) -> dict[str, Any]:
    """Return the keys and values of ``--fix key=value``, each of the type that the plan has.

    A degree that is "rest" is not fixed at all.

    Raises:
        PlanError: no key=value, a key that a plan does not have, one given twice, or a value of another type.

    >>> parse_fixed(["tensor=1", "recompute=blocks"])
    {'tensor': 1, 'recompute': 'blocks'}
    """
    hints = typing.get_type_hints(Plan)
    known = [each.name for each in fields(Plan) if each.name not in _NOT_FIXED]
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or not key:
            raise PlanError(f"--fix {setting!r}: expected key=value", remedy="such as --fix tensor=1")
        if key not in known:
            raise PlanError(f"--fix {setting}: a plan has no key {key!r}", remedy=did_you_mean(key, known))
        value = convert(text, hints[key], where=f"--fix {key}", name=key, error=PlanError)
        if key in found and found[key] != value:
            raise PlanError(f"--fix {key}={text}: {key} is fixed to {found[key]!r} too", remedy="drop one of them")
        if key in ORDER and value != REST and value < 1:
            raise PlanError(f"--fix {setting}: expected at least 1")
        found[key] = value
    return {key: value for key, value in found.items() if not (key in ORDER and value == REST)}
