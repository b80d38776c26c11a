"""The plan: everything that decides how a run is spread, in one frozen, versioned value.

A plan is written by a user or a planner, read by ``farandole run --plan`` and `fd.distribute`, stored with every
run and compared with ``==``. There is no second way to configure a run. Keys are here when they have an effect.

>>> Plan.from_mapping({"bucket_bytes": "4MiB"}, where="example").bucket_bytes
4194304
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .codec_spec import NONE, CodecSpec
from .config import PLAN_TABLES, build, flatten, read_mapping, settle
from .degrees import EQUAL, REST, Degree, shares_of
from .errors import PlanError
from .rules import DEFAULT_SCHEDULE, MOST_ZERO, check, refuse_train_schedule, require_schedule
from .sync_spec import EVERY_STEP, SyncSpec
from .text import did_you_mean, upgrade_remedy

PLAN_VERSION = 1
USUAL_BUCKET_BYTES, DEVICE_BUCKET_BYTES = 4 * 2**20, 25 * 2**20
"""The sizes of buckets where a plan leaves it open. An exchange is longer to start on an accelerator."""
TENSOR_WORDS = ("columns", "rows", "vocabulary", "attention", "whole", "divide")
"""What `tensor_recipe` says of a layer; and "divide" of a whole number of a module, such as a count of heads."""
RouteName = Literal["flat", "shared", "hierarchical"]
_GONE_ROUTES = ("server", "sharded_server")
_GONE_KEYS: dict[str, Any] = {"ranks_per_switch": 0, "switch_of": {}}
"""Keys of earlier versions, with what a plan had that did not set them."""
_WRITES = "farandole plan ... --out FILE writes one; docs/reference/plan.md has its keys, to write one by hand"


@dataclass(frozen=True)
class Plan:
    """The configuration of a run: how it is distributed over its ranks. Immutable; the defaults suit most runs.

    Each field is documented below; docs/reference/plan.md has the same list. The constructor takes texts as a
    file does ("25 MiB"), and raises `PlanError` for values of other types, out of range, or that contradict each
    other.
    """

    version: int = PLAN_VERSION
    """Version of this format; a newer one is refused."""
    bucket_bytes: int = 0
    """Gradients are exchanged in buckets of about this many bytes. 0: 4 MiB, and 25 MiB on accelerators."""
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
    """Whether codec "auto" may choose lossy codecs (their residual is sent later); those by name need no leave."""
    codec_for: Mapping[str, str] = field(default_factory=dict)
    """Codecs of the parameters whose names match a pattern such as "*.embedding.*"; the last match counts."""
    route: Literal["auto"] | RouteName = "auto"
    """Route of the buckets: "auto" uses shared memory inside a host if possible, "flat" never does."""
    connections: int = 1
    """TCP connections between two ranks, used round-robin by messages; codec "auto" tries 2 and 4 if this is 1."""
    congestion_control: str = ""
    """TCP congestion control of messages, e.g. "cubic" on hosts with "bbr". Empty: the host's default."""
    staging: Literal["auto", "always", "never"] = "auto"
    """On accelerators: whether codecs' messages go through CPU memory and TCP; "auto": where that is faster."""
    zero: int = 0
    """ZeRO stage. 1: optimizer states are sharded over the ranks, 2: gradients too, 3: parameters too."""
    shard_within: Literal["world", "host"] = "world"
    """At `zero` = 3: shard over all ranks, or inside each host with a copy on every host (hybrid)."""
    data: Degree = REST
    """Number of replicas that train on different samples; "rest": what the other degrees leave."""
    shard: Degree = 1
    """With `zero`: ranks that share one copy of what is sharded; 1: all data-parallel ranks do."""
    tensor: Degree = 1
    """Ranks that divide each layer (tensor parallel)."""
    tensor_recipe: Mapping[str, str] = field(default_factory=dict)
    """How layers are divided, by patterns of names: {"*.q_proj" = "columns", "*.o_proj" = "rows"}."""
    sequence_parallel: bool = False
    """Whether, with `tensor`, tokens are divided outside of divided layers: in norms, dropout and residuals."""
    pipeline: Degree = 1
    """Ranks that each hold some layers, and pass micro-batches on (pipeline parallel)."""
    schedule: str = DEFAULT_SCHEDULE
    """Order of micro-batches in a pipeline: "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-v"."""
    micro_batches: int = 0
    """Parts of a batch of `fd.step`; 0: twice the ranks of the pipeline, 1 without one."""
    chunks: int = 0
    """Stages a rank, with schedule "interleaved"; 0: 2."""
    weight_versions: int = 1
    """2: batches follow without a flush, with gradients of weights one step old. See docs/fit/one-model.md."""
    pipeline_cuts: tuple[str, ...] = ()
    """First module of each stage but the first, by name or number of the block; empty: by measured cost."""
    expert: Degree = 1
    """Ranks that divide the experts of each layer, on samples of their own (expert parallel)."""
    expert_codec: Literal["none", "bf16", "int8"] = "none"
    """How tokens travel to experts of other ranks, and back: "int8" rounds them, with a scale a token. Lossy."""
    context: Degree = 1
    """Ranks that divide each sequence (context parallel)."""
    context_kind: Literal["auto", "ring", "heads"] = "auto"
    """With `context`: keys and values go around a "ring", or "heads" are divided; "auto": heads that divide."""
    weight_codec: Literal["none", "int8"] = "none"
    """From `zero` = 1: how parameters travel to all ranks; "int8" rounds them for forward and backward."""
    overlap_gather: bool = False
    """At `zero` = 1 and 2: updated parameters arrive during the next forward pass. See docs/fit/memory.md."""
    recompute: Literal["none", "blocks"] | tuple[str, ...] = "none"
    """Recompute activations in backward: of repeated "blocks", or of modules whose names match patterns."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Forward passes under autocast, parameters in float32; "fp16" with dynamic loss scaling."""
    bf16_parameters: bool = False
    """Parameters and gradients in bfloat16 too, updates rounded stochastically; with precision "bf16"."""
    frozen_codec: Literal["none", "int8", "int4"] = "none"
    """Store weights of Linear and Embedding layers that do not train in 8 or 4 bits an element, with scales."""
    offload: Literal["none", "disk"] = "none"
    """"disk": states of the optimizer are in memory-mapped files, and in memory while they are used."""
    offload_directory: str = ""
    """Where these files are, on a disk of each host. Empty: /var/tmp."""
    train_schedule: Mapping[str, str] = field(default_factory=dict)
    """Which parameters train from which step on: {"0" = "head.*", "100" = "*"}; several patterns: by spaces."""
    nonfinite: Literal["propagate", "skip", "raise"] = "propagate"
    """If a gradient with a codec has NaN or infinity: NaN on all ranks, skip the step, or raise."""
    timeout_seconds: float = 600.0
    """How long a rank waits for the others before it raises, in seconds."""
    stall_seconds: float = 10.0
    """Say which rank is where after this many seconds without a step, or 20 median steps if longer. 0: never."""
    check_every: int = 10
    """Steps between two comparisons of all that ranks' models have in common (from 8 on); 0: never."""
    on_difference: Literal["stop", "warn"] = "stop"
    """If they differ: "stop" on all ranks, before the next checkpoint, or say so once."""
    on_failure: Literal["continue", "stop"] = "stop"
    """With `--min-np`, when a rank is lost: "stop", or "continue": its step is made again by the others."""
    sync: str = EVERY_STEP
    """When replicas agree: "every_step", "local:H=30", "async" by servers: see docs/fast/rarely-meeting.md."""
    balance: str = EQUAL
    """How data ranks share a batch: "none" (equally), by measured "speed", or in proportion, such as "2,1,1"."""
    balance_cap: int = 0
    """With `balance`: the most samples of a batch on one rank, for its memory. 0: no limit."""
    predicted: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What the planner expects of a step: seconds, memory, and seconds by term. No effect on training."""

    def __post_init__(self) -> None:
        _refuse_gone_routes(self.route, "plan")
        settle(self, where="plan", error=PlanError)
        for name in ("codec", "sync"):
            object.__setattr__(self, name, getattr(self, name).strip())
        if self.version > PLAN_VERSION:
            raise PlanError(
                f"plan version {self.version} is newer than {PLAN_VERSION}, the newest this farandole reads",
                remedy=upgrade_remedy(),
            )
        refuse_impossible(self.predicted)
        for pattern, word in self.tensor_recipe.items():
            if word not in TENSOR_WORDS:
                raise PlanError(
                    f"plan: tensor_recipe: {pattern!r} = {word!r}, expected one of {', '.join(TENSOR_WORDS)}",
                    remedy=did_you_mean(word, TENSOR_WORDS),
                )
        require_schedule(self.schedule, self.chunks)
        refuse_train_schedule(self.train_schedule)
        shares_of(self.balance)
        SyncSpec.parse(self.sync)
        CodecSpec.parse(self.codec, where="plan: codec")
        for pattern, codec in self.codec_for.items():
            CodecSpec.parse(codec, where=f"plan: codec_for.{pattern}")
        check(vars(self))

    def lossy_keys(self) -> dict[str, str]:
        """Return which keys make what ranks exchange lossy in every step, at any stage, with their codecs.

        The permission `lossy` is none of them: what codec "auto" chooses by it is decided in the training.
        """
        codecs = [self.codec, *self.codec_for.values()]
        applied = dict.fromkeys(each for each in codecs if CodecSpec.parse(each).is_applied)
        named = {"codec": ", ".join(applied), "weight_codec": self.weight_codec, "expert_codec": self.expert_codec}
        return {name: text for name, text in named.items() if text not in ("", NONE)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, where: str) -> Plan:
        """Build a plan from keys and values; raise `PlanError` on unknown keys and wrong types."""
        # A newer plan may well have keys we do not know: its version is the answer, not the first such key.
        version = values.get("version", PLAN_VERSION)
        if isinstance(version, int) and version > PLAN_VERSION:
            return cls(version=version)
        keys = flatten(_without_gone_keys(values, where), PLAN_TABLES, where=where, error=PlanError)
        _refuse_gone_routes(keys.get("route"), where)
        return build(cls, keys, where=where, error=PlanError)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan from a ``.toml`` or ``.json`` file."""
        return cls.from_mapping(read_mapping(Path(path), error=PlanError, remedy=_WRITES), where=str(path))

    @classmethod
    def read_keys(cls, path: str | Path) -> dict[str, Any]:
        """Return the keys that a file gives, without its tables. Raises `PlanError` as `read` does."""
        values = read_mapping(Path(path), error=PlanError, remedy=_WRITES)
        cls.from_mapping(values, where=str(path))
        return flatten(_without_gone_keys(values, str(path)), PLAN_TABLES, where=str(path), error=PlanError)

    def to_mapping(self) -> dict[str, Any]:
        """Return all keys and values; `from_mapping` gives the same plan back."""
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """Return the plan as TOML. A key whose value is none is left out."""
        lines = [f"{name} = {_to_toml(value)}" for name, value in self.to_mapping().items() if value is not None]
        return "\n".join(lines) + "\n"

    def with_bucket_bytes(self, *, on_device: bool) -> Plan:
        """Return the plan with a size of buckets, if it has any; `on_device`: gradients are on an accelerator."""
        chosen = DEVICE_BUCKET_BYTES if on_device else USUAL_BUCKET_BYTES
        is_open = not self.bucket_bytes and self.zero < MOST_ZERO
        return dataclasses.replace(self, bucket_bytes=chosen) if is_open else self

    def differences(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Return the keys in which two plans train differently, with both values."""
        mine, theirs = ({**plan.to_mapping(), "predicted": {}} for plan in (self, other))
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def _without_gone_keys(keys: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `keys` without those that earlier versions wrote. Raises `PlanError` for one that was set."""
    kept = {}
    for name, value in keys.items():
        if name in PLAN_TABLES and isinstance(value, Mapping):
            kept[name] = _without_gone_keys(value, where)
        elif name not in _GONE_KEYS:
            kept[name] = value
        elif value != _GONE_KEYS[name]:
            raise PlanError(
                f"{where}: {name} = {value!r} is gone: ranks behind a switch are no group of their own",
                remedy='leave it out: route = "hierarchical" adds up inside each host first',
            )
    return kept


def _refuse_gone_routes(route: object, where: str) -> None:
    if route in _GONE_ROUTES:
        raise PlanError(
            f"{where}: route = {route!r} is gone: a rank no longer sums for the others",
            remedy='use sync = "server:staleness=0", whose servers are processes of their own, or leave route out',
        )


def _to_toml(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(key)} = {json.dumps(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return json.dumps(value)


# What a plan says that a step will take: the names under its key `predicted`, and what values are possible.
#
# The planner writes these figures into the plan, and a run that applied it is measured against them. They have no
# effect on training.


Term = Literal[
    "compute", "recompute", "optimizer", "data", "shard", "tensor", "context", "expert", "transfer", "bubble",
    "codec", "loader", "straggler",
]  # fmt: skip
"""Parts of a step. They are disjoint, and their sum is the step: exchanges count as far as nothing hides them."""
TERMS: tuple[Term, ...] = get_args(Term)
STEP, LOW, HIGH = "step_seconds", "low_seconds", "high_seconds"
"""A step of the optimizer, and the interval that it is expected in."""
PEAK = "peak_bytes"
"""Memory of the rank that needs most, at most."""
RANKS, GLOBAL_BATCH = "ranks", "global_batch"
"""What it was predicted for: a step of other ranks or samples is no test of it."""
NAMES = (STEP, LOW, HIGH, PEAK, RANKS, GLOBAL_BATCH, *TERMS)
"""All names under `predicted`. A term is in seconds."""


def refuse_impossible(predicted: Mapping[str, float]) -> None:
    """Raise `PlanError` for names that are not of `NAMES`, and for values that nothing can take or hold."""
    for name, value in predicted.items():
        _refuse_value(name, value)
    if not predicted:
        return
    if STEP not in predicted:
        raise PlanError(
            f"plan: predicted has no {STEP}",
            remedy="write the predicted seconds of a step under this name, or leave predicted out",
        )
    step = predicted[STEP]
    for name, sign, than in ((LOW, -1, "most"), (HIGH, 1, "least")):
        if sign * (predicted.get(name, step) - step) < 0:
            raise PlanError(
                f"plan: predicted.{name} = {predicted[name]}, expected at {than} {STEP} = {step}",
                remedy="make the plan anew with farandole plan, or leave predicted out",
            )


def _refuse_value(name: str, value: float) -> None:
    where = f"plan: predicted.{name}"
    if name not in NAMES:
        expected = ", ".join(NAMES)
        raise PlanError(f"{where} is unknown, expected one of {expected}", remedy=did_you_mean(name, NAMES))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"{where} = {value!r}, expected a number")
    if not 0 <= value < math.inf:
        raise PlanError(f"{where} = {value}, expected a finite number from 0")
    if name in (STEP, RANKS, GLOBAL_BATCH) and not value:
        raise PlanError(f"{where} = {value}, expected more than 0")
    if name in (RANKS, GLOBAL_BATCH) and value != round(value):
        raise PlanError(f"{where} = {value}, expected a whole number")
