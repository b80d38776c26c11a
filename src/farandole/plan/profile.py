"""The profile of a model: its units in the order in which they run, each folded with its equals.

A unit is what the planner moves as a whole: a repeated block, or what is before, between and after blocks (an
embedding, a head). Facts are those of one sample, so that any batch follows by multiplication. Nothing here
imports torch: a profile is made by `farandole.train.analysis`, stored as JSON, and read without a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

from ..core.vocabulary.config import FieldPath, from_plain, numbers_of, read_mapping, to_plain
from ..core.vocabulary.errors import ConfigError
from .memory import ModelFacts


@dataclass(frozen=True)
class TensorFacts:
    """How tensor parallel divides a unit, by its recipe. Without a recipe a unit is replicated."""

    divides: int
    """Largest number of ranks: heads, or columns. It must be a multiple of the degree."""
    parameters: int
    """Trainable parameters that are divided; the rest of the unit's is replicated."""
    flops: float
    """What is divided of `forward_flops`."""
    saved_bytes: float
    """What is divided of `saved_bytes`."""
    sum_bytes: float
    """Bytes of one all-reduce of activations, a sample, in fp32."""
    forward_sums: int = 2
    """All-reduces in a forward pass."""
    backward_sums: int = 2
    """All-reduces in a backward pass."""
    tokens: int = 0
    """Tokens of a sample that `sequence_parallel` may divide. 0: something in the unit may need all of them, or it
    is no block that takes (batch, tokens, features), or the profile is older than this."""


@dataclass(frozen=True)
class ExpertFacts:
    """Experts of a unit."""

    experts: int
    parameters: int
    """Parameters of all experts of the unit."""
    flops: float
    """What experts compute of `forward_flops`."""
    token_bytes: float
    """What a rank sends to experts in one direction, a sample, in fp32, if all tokens travel."""


@dataclass(frozen=True)
class AttentionFacts:
    """Attention inside of a unit, for context parallel."""

    heads: int
    key_value_bytes: float
    """Keys and values of a sample, in fp32."""
    sequence: int
    """Tokens of a sample."""
    saved_bytes: float
    """What of `saved_bytes` grows with the sequence: with context parallel all of it is divided."""
    query_bytes: float = 0.0
    """Queries of a sample, in fp32; 0: half of `key_value_bytes`, as where there are as many heads of keys."""
    key_value_heads: int = 0
    """0: as many as `heads`."""
    has_dropout: bool = False
    """Whether weights of attention are dropped: context parallel then needs heads that divide."""


@dataclass(frozen=True)
class UnitTimes:
    """Measured seconds of a unit on one rank: fixed + samples x per sample. No figure is negative."""

    forward_fixed_seconds: float
    forward_sample_seconds: float
    backward_fixed_seconds: float
    backward_sample_seconds: float
    samples: tuple[int, ...]
    """Sizes that were measured; outside of them a time is extrapolated."""
    threads: int = 1
    spread: float = 0.0
    """Half of the interval of the median, as a share of it."""
    jitter: float = 0.0
    """Standard deviation of one pass, by the middle half of those that were timed, as a share of the median."""


@dataclass(frozen=True)
class UnitGradient:
    """One trainable parameter of a unit."""

    name: str
    rows: int
    columns: int
    """1 for a vector."""
    element_bytes: int = 4
    divided_by: str = ""
    """The degree that divides it, "tensor" or "expert"; empty: none, or not known (`TensorFacts.parameters`)."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.rows * self.columns * self.element_bytes


@dataclass(frozen=True)
class ModelUnit:
    """A part of the model, and how often it follows itself. All figures are of one of them, and of one sample."""

    name: str
    """Name of the first module, such as "layers.0"."""
    kind: str
    """Its class."""
    count: int
    """How many equal ones follow each other."""
    gradients: tuple[UnitGradient, ...]
    """Trainable parameters, in the order in which backward makes their gradients. Tied ones: where first used."""
    frozen_bytes: int
    forward_flops: float
    backward_flops: float
    operations: int
    """Operations of a forward pass that start a kernel."""
    moved_bytes: float
    """What a forward pass reads and writes, in fp32, without parameters: these are read once for all samples."""
    saved_bytes: float
    """What backward needs, in fp32, without parameters."""
    output_bytes: float
    """What goes to the next unit, in fp32."""
    products: int = 0
    """What of `operations` are products of matrices or convolutions; 0: not known."""
    fused_flops: float = 0.0
    """What of `forward_flops` attention in one kernel computes: with a causal mask half of all scores."""
    fused_backward_flops: float = 0.0
    """The same of `backward_flops`."""
    uncast_flops: float = 0.0
    """What of `forward_flops` autocast leaves in the type of its weights, as experts of transformers are."""
    tensor: TensorFacts | None = None
    expert: ExpertFacts | None = None
    attention: AttentionFacts | None = None
    times: UnitTimes | None = None
    is_block: bool | None = None
    """Whether it is one of the repeated blocks; None: not known."""

    @property
    def parameters(self) -> int:
        """Trainable parameters of one of them."""
        return sum(each.rows * each.columns for each in self.gradients)


@dataclass(frozen=True)
class ModelProfile:
    """A model, as the planner sees it."""

    name: str
    units: tuple[ModelUnit, ...]
    samples: int
    """Samples of the example batch."""
    batch_bytes: float
    """Bytes of one sample of input."""
    memory: ModelFacts
    """As `farandole estimate` has it, for the example batch."""
    optimizer: str
    """Name of torch's optimizer, such as "adamw"."""
    optimizer_state_bytes: float
    """A parameter."""
    optimizer_moved_bytes: float
    """What a step reads and writes, a parameter."""
    optimizer_operations: float = 0.0
    """What a step starts for each tensor; where all are updated at once, for all of them."""
    elementwise_optimizer: bool = True
    """Whether ZeRO may divide its states."""
    blocks: int = 0
    """Repeated blocks: where a pipeline may be cut."""
    can_be_cut: str = ""
    """Why a pipeline cannot cut this model; empty: it can."""
    tied: tuple[str, ...] = ()
    """Parameters with several names, as in "embedding.weight = head.weight": stages may share them."""
    notes: tuple[str, ...] = ()
    """What is not known: blocks without a recipe, operations without a count."""
    device: str = ""
    """"cpu" or "cuda": whose operations were counted. Empty: not known."""
    tensor_recipe: Mapping[str, str] = field(default_factory=dict)
    """The plan key that the model was analysed with; plans that divide layers have it."""
    measured: Mapping[str, str] = field(default_factory=dict)
    """Where `times` come from: host, threads, date. Empty: nothing was measured."""

    def fails_in(self, precision: str, recompute: str) -> bool:
        """Whether a pass of the model failed so."""
        return ("bf16" if precision == "fp16" else precision, recompute) in self.memory.failed

    @property
    def parameters(self) -> int:
        """Trainable parameters."""
        return sum(unit.count * unit.parameters for unit in self.units)


# Folded units taken apart: where equal units are treated differently, as by patterns of their names.


def name_of(first: str, number: int) -> str:
    """Return the name of the unit that is so many after the one that is named `first`.

    >>> name_of("model.layers.4", 3)
    'model.layers.7'
    """
    stem, _, last = first.rpartition(".")
    if not number or not last.isdigit():
        return first
    return f"{stem}.{int(last) + number}" if stem else str(int(last) + number)


def unfolded(profile: ModelProfile, patterns: Sequence[str]) -> ModelProfile:
    """Return the profile with units folded only where all of them match one of `patterns`, or none does."""
    units: list[ModelUnit] = []
    for unit in profile.units:
        runs = groupby(range(unit.count), key=lambda number: _matches(name_of(unit.name, number), patterns))
        for _, run in runs:
            numbers = list(run)
            units.append(replace(unit, name=name_of(unit.name, numbers[0]), count=len(numbers)))
    return profile if len(units) == len(profile.units) else replace(profile, units=tuple(units))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# A `ModelProfile` as a JSON file: written whole, and read strictly, with the place of what is wrong.
#
# Its fields are those of the types, so that there is one definition of what a profile says. Keys of activations
# are a precision and a recomputation, such as "fp32/none".


FORMAT = "farandole model profile"
VERSION = 1
_POSITIVE = ("samples", "count", "experts", "heads", "divides", "rows", "columns", "element_bytes", "sequence")
"""Fields of which 0 says nothing."""
_PARTS = (
    ("fused_flops", "forward_flops"), ("fused_backward_flops", "backward_flops"), ("products", "operations"),
)  # fmt: skip
"""Figures of a unit that are parts of others."""


def write_profile(profile: ModelProfile, path: str | Path) -> None:
    """Write a profile; a file of that name is replaced. Raises `ConfigError` if it cannot be written."""
    path = Path(path)
    text = json.dumps(profile_to_mapping(profile), indent=1, allow_nan=False) + "\n"
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be written: {problem.strerror}") from None


def read_profile(path: str | Path) -> ModelProfile:
    """Read a profile.

    Raises:
        ConfigError: the file cannot be read, is no profile, or of another version; a field is missing, unknown, of
            another type, or impossible. The error has the field's path.
    """
    return profile_from_mapping(read_mapping(Path(path), remedy=_REMEDY, is_json=True), str(path))


_REMEDY = "make it again from the model"


def profile_to_mapping(profile: ModelProfile) -> dict[str, Any]:
    """Return a profile as plain values for JSON."""
    return {"format": FORMAT, "version": VERSION, **to_plain(profile)}


def profile_from_mapping(mapping: Any, where: str = "profile") -> ModelProfile:
    """Return the profile that `profile_to_mapping` was given; `where` begins the paths of errors."""
    if not isinstance(mapping, dict) or mapping.get("format") != FORMAT:
        raise ConfigError(f'{where}: is no profile of a model: "format" is not {FORMAT!r}', remedy=_REMEDY)
    version = mapping.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(f"{where}: version = {version!r}, expected {VERSION}", remedy=_REMEDY)
    fields = {key: value for key, value in mapping.items() if key not in ("format", "version")}
    path = FieldPath(where, remedy=_REMEDY)
    profile = from_plain(ModelProfile, fields, path)
    for at, name, number in numbers_of(profile, path, whole=int):
        if number < (least := 1 if name in _POSITIVE else 0):
            at.refuse(f" = {number}, expected at least {least}")
    _check(profile, where)
    return profile


def _check(profile: ModelProfile, where: str) -> None:
    """Raise `ConfigError` where fields contradict each other."""
    if not profile.units:
        raise ConfigError(f"{where}: units: a model has at least one")
    if profile.device not in ("", "cpu", "cuda"):
        raise ConfigError(f"{where}: device = {profile.device!r}, expected 'cpu' or 'cuda'", remedy=_REMEDY)
    for number, unit in enumerate(profile.units):
        path = f"{where}: units.{number}"
        for part_name, whole_name in _PARTS:
            some, whole = getattr(unit, part_name), getattr(unit, whole_name)
            if some > whole * (1 + 1e-6):
                raise ConfigError(f"{path}.{part_name} = {some:g}, more than {whole_name} = {whole:g}")
        for name in ("tensor", "expert"):
            part = getattr(unit, name)
            if part is not None and part.flops > unit.forward_flops * (1 + 1e-6):
                raise ConfigError(
                    f"{path}.{name}.flops = {part.flops:g}, more than the unit's forward_flops = "
                    f"{unit.forward_flops:g}"
                )
            if part is not None and part.parameters > unit.parameters + unit.frozen_bytes:
                raise ConfigError(
                    f"{path}.{name}.parameters = {part.parameters}, more than the unit has: {unit.parameters}"
                )
        if unit.tensor is not None and unit.tensor.saved_bytes > unit.saved_bytes * (1 + 1e-6):
            raise ConfigError(
                f"{path}.tensor.saved_bytes: more than the unit's saved_bytes = {unit.saved_bytes:g}"
            )
    for name in profile.memory.weights:
        if name not in profile.memory.optimizer:
            raise ConfigError(f"{where}: memory.optimizer.{name}: is missing", remedy=_REMEDY)
