"""What a plan's keys cannot be together: one table, and the only function that refuses a combination.

A rule names keys with the values that are refused, why, and a remedy. Asked are a plan when it is made, its
degrees above 1 when the number of ranks is known, and what only a job knows (`FACTS`). The planner asks before it
proposes a plan. What a single key may be is here too; how its text is read is where it is parsed. What a model
refuses is said where the plan is applied to it.

>>> print(broken({"zero": 1, "expert": 2}).said({"zero": 1, "expert": 2}))
plan: zero = 1 with expert = 2 is not there yet
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from .codec_spec import AUTO, NONE, OPTIONS, CodecSpec
from .degrees import EQUAL, ORDER, REST, SPEED
from .errors import PlanError
from .sync_spec import ASYNC, EVERY_STEP, MEASURED, SERVER
from .text import did_you_mean

# Schedules of a pipeline, which `core/schedule` builds, and of what trains.

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
DEFAULT_SCHEDULE = "1f1b"
SEVERAL_STAGES = ("interleaved", "zb-v")
"""Schedules with more than one stage a rank."""
DEFAULT_CHUNKS = 2
MOST_WEIGHT_VERSIONS = 2
"""PipeDream-2BW: Narayanan et al. 2006.09503, section 3.1."""


def require_schedule(name: str, chunks: int = 0) -> None:
    """Raise `PlanError` unless `name` is a schedule that can have `chunks` stages a rank; 0: its default."""
    if name not in SCHEDULES:
        raise PlanError(f"plan: schedule = {name!r} is none", remedy=did_you_mean(name, SCHEDULES))
    if chunks < 0:
        raise PlanError(f"plan: chunks = {chunks}, expected a number from 1, or 0 for the schedule's own")
    if name == "interleaved" and chunks == 1:
        raise PlanError(
            'plan: schedule = "interleaved" with chunks = 1 is 1f1b',
            remedy='set chunks = 2 or more, or schedule = "1f1b"',
        )
    if name != "interleaved" and chunks not in (0, chunks_of(name)):
        each = chunks_of(name)
        raise PlanError(
            f'plan: chunks = {chunks}, but schedule = "{name}" has {each} stage{"s" * (each > 1)} a rank',
            remedy='leave chunks out, or set schedule = "interleaved"',
        )


def chunks_of(name: str, chunks: int = 0) -> int:
    """Return how many stages a rank has in the schedule `name`; `chunks`: the plan's, 0 for the default."""
    return (chunks or DEFAULT_CHUNKS) if name in SEVERAL_STAGES else 1


def refuse_train_schedule(schedule: Mapping[str, str]) -> None:
    """Raise `PlanError` for a step that is none, one without patterns, and a schedule without a begin."""
    for step, patterns in schedule.items():
        if not (step.isascii() and step.isdigit() and str(int(step)) == step):
            raise PlanError(f"plan: train_schedule has the step {step!r}, expected a whole number from 0")
        if not patterns.split():
            raise PlanError(f"plan: train_schedule has no pattern for step {step}")
    if schedule and "0" not in schedule:
        raise PlanError(
            "plan: train_schedule does not say what trains from step 0 on",
            remedy='begin with an entry such as "0" = "head.*"',
        )


MOST_CONNECTIONS: Final = 16
MOST_ZERO: Final = 3
"""The last stage of ZeRO (Rajbhandari et al. 2020, section 5): states, gradients and parameters are sharded."""
FACTS: Final = {
    "elastic": "in an elastic job", "one_bit_adam": "with OneBitAdam", "tune": "in farandole tune",
    "noise_scale": "with noise_scale", "horovod": "with hvd.DistributedOptimizer",
    "trainer": "with FarandoleTrainer", "accelerator": "with FarandoleAccelerator",
    "lightning": "with FarandoleStrategy", "resume": "with resume_from_checkpoint",
    "save_state": "with save_state and load_state of Accelerate",
}  # fmt: skip
"""What is no key of a plan, in words: `check` is told of it where it is so."""
DIVIDING: Final = ("pipeline", "expert", "context", "tensor")
"""Degrees of which a rank holds a part of the model, or of a sample."""
_CONGESTION_CONTROL: Final = re.compile(r"(?:[a-z0-9_-]{1,15})?")
"""Longer names Linux does not have."""
_BUCKET_KEYS: Final[Mapping[str, Any]] = {
    "bucket_bytes": 0, "first_bucket_bytes": 2**20, "codec_for": {}, "route": "auto", "connections": 1,
    "congestion_control": "", "staging": "auto",
}  # fmt: skip
"""Keys of buckets and routes, with their defaults."""
_PIPELINE_KEYS: Final[Mapping[str, Any]] = {
    "schedule": DEFAULT_SCHEDULE, "chunks": 0, "weight_versions": 1, "pipeline_cuts": (),
}  # fmt: skip

_OF_THE_MODEL: Final[Mapping[str, Any]] = {
    "sync_batch_norm": False, "recompute": NONE, "bf16_parameters": False, "precision": "fp32", "zero": 0,
    "shard_within": "world", "weight_codec": NONE, "overlap_gather": False, "frozen_codec": NONE, "offload": NONE,
    "offload_directory": "", "train_schedule": {}, **dict.fromkeys(ORDER, 1), "data": REST, "tensor_recipe": {},
    "sequence_parallel": False, "context_kind": "auto", "expert_codec": NONE, **_PIPELINE_KEYS, "micro_batches": 0,
    "sync": EVERY_STEP,
}  # fmt: skip
"""Keys that change a model or its passes, with their defaults."""

Test = Callable[[Any], bool]
Values = Mapping[str, Any]


def _one_of(*values: Any) -> Test:
    return lambda value: value in values


def _other_than(*values: Any) -> Test:
    return lambda value: value not in values


def _above(least: int) -> Test:
    """A degree that is still "rest" is not known yet."""
    return lambda value: value != REST and value > least


def _below(least: int) -> Test:
    return lambda value: value != REST and value < least


def _is_set(value: Any) -> bool:
    return bool(value)


def _is_schedule_of_parts(schedule: str) -> bool:
    return schedule.startswith("zb")


def _is_server(sync: str) -> bool:
    return sync.partition(":")[0] in (SERVER, ASYNC)


def _meets_by_steps(sync: str) -> bool:
    return sync not in (EVERY_STEP, MEASURED)


def _needs_whole(codec: str) -> bool:
    """Whether a codec cannot send each element to one rank."""
    if codec == NONE:
        return False  # of nearly all plans
    spec = CodecSpec.parse(codec)
    return not spec.is_exact and not spec.is_quantized


def _changes_norm(codec: str) -> bool:
    return codec not in (NONE, AUTO) and not CodecSpec.parse(codec).preserves_norm


def _is_not_for_shards(codec: str) -> bool:
    return codec != NONE and not CodecSpec.parse(codec).works_on_shards


class Rule(NamedTuple):
    """Values that are refused together."""

    values: Mapping[str, Test]
    """By key, degree or fact: whether its value is among those."""
    why: str
    """Goes on after the keys and their values."""
    remedy: str = ""
    where: Callable[[Values], bool] = lambda values: True
    """What all values together must fulfil besides."""

    def refuses(self, values: Values) -> bool:
        """Return whether all of `values` that it asks for are there, and refused."""
        for key, test in self.values.items():
            if key not in values or not test(values[key]):
                return False
        return self.where(values)

    def said(self, values: Values) -> str:
        """Return the message for `values`."""
        first, *others = (f"{key} = {shown(values[key])}" for key in self.values if key not in FACTS)
        words = [first, *(f"{'and' if number else 'with'} {each}" for number, each in enumerate(others))]
        words += [FACTS[key] for key in self.values if key in FACTS]
        return f"plan: {' '.join(words)}{self.why}"


def shown(value: Any) -> str:
    """Return a value as a plan file has it, but for what only Python can say."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value) if isinstance(value, tuple) else value)


_NOT_YET: Final = " is not there yet"
_ALONE: Final = "and ranks train on their own between meetings"
_START_AGAIN: Final = "save checkpoints (fd.Checkpointer), and start the job again with the ranks that are left"
_TO_ONE_RANK: Final = ", which sends every element to one rank: this codec does not"
_AFTER_WARM_UP: Final = "which after its warm-up exchanges no gradients"
_RARELY, _WITH_SERVERS = {"sync": _other_than(EVERY_STEP)}, {"sync": _is_server}
_UNEQUAL, _BY_SPEED = {"balance": _other_than("", EQUAL)}, {"balance": _one_of(SPEED)}
_BY_DISTRIBUTE: Final = "farandole.distribute(model, optimizer)"
_INSTEAD_OF_KEYS: Final[Mapping[str, str]] = {
    "sync_batch_norm": "model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)",
    "recompute": "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
    "bf16_parameters": "model.bfloat16(), before the optimizer is made",
    "precision": "torch.autocast around the forward pass, and a torch.amp.GradScaler for float16",
}
"""What a script without a plan writes."""
_SHARDED: Final = [name for name in OPTIONS if CodecSpec.parse(name).works_on_shards]

# fmt: off
RULES: Final = (
    # -- one key ---------------------------------------------------------------------------------
    Rule({"bucket_bytes": _below(0)}, ", expected at least 0"),
    *(Rule({key: _below(1)}, ", expected at least 1")
      for key in ("version", "first_bucket_bytes", "accumulate", "connections")),
    *(Rule({key: _below(1)}, ', expected at least 1, or "rest"') for key in ORDER),
    Rule({"zero": _other_than(0, 1, 2, MOST_ZERO)}, ", expected 0 to 3", "3 shards most (docs/fit/memory.md)"),
    Rule({"micro_batches": _below(0)}, ", expected a number from 1, or 0 for the default"),
    Rule({"weight_versions": _other_than(1, MOST_WEIGHT_VERSIONS)},
         ", expected 1, or 2 for batches without a flush between them"),
    Rule({"connections": _above(MOST_CONNECTIONS)}, f", expected at most {MOST_CONNECTIONS}"),
    Rule({"congestion_control": lambda value: not _CONGESTION_CONTROL.fullmatch(value)},
         ", expected a name such as cubic or bbr"),
    Rule({"clip_norm": lambda value: value is not None and not 0 < value < math.inf},
         ", expected a positive number or none"),
    Rule({"timeout_seconds": lambda value: not 0 < value < math.inf}, ", expected a positive number"),
    Rule({"stall_seconds": lambda value: not 0 <= value < math.inf}, ", expected a number from 0 (0: never)"),
    Rule({"recompute": lambda value: isinstance(value, tuple) and (not value or "" in value)},
         ", expected patterns of module names such as 'layers.*'", 'use recompute = "none" to recompute nothing'),
    Rule({"balance_cap": _below(0)},
         ", expected samples of a batch from 1, with unequal shares, or 0 for no limit",
         'leave balance_cap out, or set balance = "speed"'),
    # -- a key without effect: what it is for is not there ----------------------------------------
    Rule({"context_kind": _other_than("auto"), "context": _one_of(1)}, ", which divides no sequences",
         "set context to the number of ranks that divide a sequence, or leave context_kind out"),
    Rule({"expert_codec": _other_than(NONE), "expert": _one_of(1)}, ": no token travels",
         "leave expert_codec out, or set expert to a number of ranks"),
    Rule({"shard": _other_than(1), "zero": _one_of(0)}, ", which shards nothing",
         "say what is sharded: zero = 3 (parameters too), 2 (gradients) or 1 (optimizer states)"),
    *(Rule({key: _is_set, "tensor": _one_of(1)}, ", which divides no layer", f"leave {key} out, or set tensor")
      for key in ("tensor_recipe", "sequence_parallel")),
    *(Rule({key: _other_than(default), "pipeline": _one_of(1)}, ": there is no pipeline",
           f"set pipeline to the number of its ranks, or leave {key} out")
      for key, default in _PIPELINE_KEYS.items()),
    Rule({"overlap_gather": _is_set, "zero": _other_than(1, 2)}, ": it is for zero = 1 and 2",
         "leave overlap_gather out, or set zero = 1"),
    Rule({"shard_within": _other_than("world"), "zero": _other_than(MOST_ZERO)}, ": it is for zero = 3",
         "leave shard_within out, or set zero = 3"),
    Rule({"weight_codec": _other_than(NONE), "zero": _one_of(0)}, ": it is for zero = 1 to 3",
         "leave weight_codec out, or set zero = 1"),
    *(Rule({key: _other_than(default), "zero": _one_of(MOST_ZERO)},
           ", where whole blocks travel: it has no effect", f"leave {key} out, or set zero = 0")
      for key, default in _BUCKET_KEYS.items()),
    Rule({"offload_directory": _is_set, "offload": _other_than("disk")}, ": nothing is written there",
         'leave offload_directory out, or set offload = "disk"'),
    Rule({"balance_cap": _above(0), "balance": _one_of("", EQUAL)}, ": it is for unequal shares",
         'leave balance_cap out, or set balance = "speed"'),
    # -- shards ----------------------------------------------------------------------------------
    Rule({"shard": _other_than(1), "shard_within": _other_than("world")}, ": both say who shares",
         "leave one of them out"),
    Rule({"zero": _one_of(1, 2), "data": _above(1), "shard": _above(1)},
         ": at stages 1 and 2 all data-parallel ranks share the shards",
         "leave data or shard out, or set zero = 3"),
    Rule({"codec": _is_not_for_shards, "zero": _one_of(MOST_ZERO)},
         ": it needs whole gradients, and a rank has shards",
         f"use one of {', '.join(_SHARDED)}, or set zero = 0"),
    Rule({"codec": _needs_whole, "zero": _one_of(1, 2)}, _TO_ONE_RANK,
         "use a quantised codec (bf16, fp16, int8, fp8, int4), or set zero = 0"),
    Rule({"codec_for": lambda codecs: any(map(_needs_whole, codecs.values())), "zero": _one_of(1, 2)},
         ", which sends every element to one rank: one of these codecs does not",
         "use quantised codecs (bf16, fp16, int8, fp8, int4), or set zero = 0"),
    *(Rule({key: _other_than(NONE), "shard_within": _one_of("host")},
           ": shards travel in the host, and the sum across hosts is exact",
           f'leave {key} out, or set shard_within = "world"')
      for key in ("codec", "weight_codec")),
    Rule({"zero": _one_of(1, 2), "expert": _above(1)}, _NOT_YET, "use zero = 3, or zero = 0"),
    *(Rule({"shard_within": _one_of("host"), degree: _above(1)}, _NOT_YET, "use shard = K, the ranks that share")
      for degree in DIVIDING),
    # -- micro-batches and the pipeline ----------------------------------------------------------
    *(Rule({"accumulate": _above(1), key: _above(1)}, ": fd.step accumulates micro-batches",
           "set micro_batches instead of accumulate")
      for key in ("micro_batches", "pipeline")),
    Rule({"schedule": _is_schedule_of_parts, "zero": _one_of(MOST_ZERO), "pipeline": _above(1)},
         f"{_NOT_YET}: gradients of inputs and weights are computed apart, and parameters are gathered for both",
         'use schedule = "1f1b" or "interleaved"'),
    Rule({"weight_versions": _above(1), "schedule": _other_than(DEFAULT_SCHEDULE)},
         ": batches follow each other without a flush by 1f1b alone",
         'set schedule = "1f1b", or leave weight_versions out'),
    Rule({"weight_versions": _above(1), "micro_batches": _above(0), "pipeline": _above(1)},
         ": with fewer micro-batches than ranks two versions of the weights are not enough",
         "set micro_batches to the ranks of the pipeline, or more",
         lambda values: bool(values["micro_batches"] < values["pipeline"])),
    *(Rule({"weight_versions": _above(1), degree: _above(1)}, _NOT_YET,
           "use pipeline and data alone, or weight_versions = 1")
      for degree in ("shard", "expert", "context", "tensor")),
    *(Rule({"weight_versions": _above(1), key: _other_than(fit)}, _NOT_YET, f"leave {key} or weight_versions out")
      for key, fit in (("zero", 0), ("sync_batch_norm", False), ("nonfinite", "propagate"))),
    Rule({"weight_versions": _above(1), "codec": _one_of(AUTO)},
         ", which chooses by steps whose backward pass ends in them", "name a codec, or none"),
    # -- precision and memory --------------------------------------------------------------------
    Rule({"bf16_parameters": _is_set, "weight_codec": _other_than(NONE), "zero": _one_of(1, 2)},
         ": what travels packed there is float32", "leave weight_codec or bf16_parameters out, or set zero = 3"),
    Rule({"bf16_parameters": _is_set, "precision": _other_than("bf16")},
         ": forward passes would not fit the parameters", 'set precision = "bf16", or leave bf16_parameters out'),
    Rule({"nonfinite": _other_than("propagate"), "precision": _one_of("fp16")},
         ", which skips steps with gradients that are not finite, and lowers its scale until they are",
         "leave nonfinite out"),
    *(Rule({key: _other_than(NONE), "bf16_parameters": _is_set}, _NOT_YET, f"leave {key} or bf16_parameters out")
      for key in ("offload", "frozen_codec")),
    *(Rule({"precision": _one_of("fp16"), degree: _above(1)}, _NOT_YET, 'use precision = "bf16"')
      for degree in ("pipeline", "expert")),
    *(Rule({"bf16_parameters": _is_set, degree: _above(1)}, _NOT_YET, "leave bf16_parameters out")
      for degree in DIVIDING),
    *(Rule({"offload": _one_of("disk"), degree: _above(1)}, _NOT_YET, "leave offload out") for degree in DIVIDING),
    *(Rule({"train_schedule": _is_set, degree: _above(1)}, _NOT_YET, "leave train_schedule out")
      for degree in ("tensor", "pipeline")),
    # -- unequal shares of a batch ---------------------------------------------------------------
    *(Rule(which | {key: _other_than(*fit)}, why, f"leave balance or {key} out")
      for which, key, fit, why in (
          *((_UNEQUAL, degree, (1,), ", whose ranks wait for each other in a pass") for degree in DIVIDING),
          (_UNEQUAL, "micro_batches", (0, 1), ", which must divide each rank's samples"),
          (_BY_SPEED, "zero", (0, 1, 2), ", where ranks wait for parameters in each pass"),
          (_BY_SPEED, "overlap_gather", (False,), ", where ranks wait for parameters in the forward pass"),
          (_UNEQUAL, "sync", (EVERY_STEP,), ", whose meetings weigh ranks by their samples, is not there yet"),
          (_BY_SPEED, "sync_batch_norm", (False,), ", where ranks wait for statistics in each pass"),
      )),
    # -- ranks that meet rarely ------------------------------------------------------------------
    *(Rule(which | {key: _other_than(*fit)}, why, f"leave sync or {key} out")
      for which, key, fit, why in (
          (_RARELY, "zero", (0,), f", whose shards each step needs, {_ALONE}"),
          (_RARELY, "pipeline", (1,), f", whose stages each step needs, {_ALONE}"),
          (_RARELY, "tensor", (1,), f", whose parts each step needs, {_ALONE}"),
          (_RARELY, "expert", (1,), f", whose experts each step needs, {_ALONE}"),
          (_RARELY, "context", (1,), f", whose parts of a sequence each step needs, {_ALONE}"),
          (_RARELY, "sync_batch_norm", (False,), f", which meets in each forward pass, {_ALONE}"),
          (_RARELY, "precision", ("fp32", "bf16"), ", whose loss scale the ranks agree on in each step"),
          (_RARELY, "bf16_parameters", (False,), ", where changes of a few steps are below its precision"),
          (_RARELY, "train_schedule", ({},), _NOT_YET),
          (_RARELY, "offload", (NONE,), _NOT_YET),
          (_RARELY, "codec_for", ({},), f"{_NOT_YET}: changes travel by one codec"),
          (_RARELY, "route", ("auto", "flat"), ", which carries gradients of each step"),
          (_WITH_SERVERS, "clip_norm", (None,),
           ", the norm of the mean gradient, which no rank has: clip in the loop (each its own)"),
          (_WITH_SERVERS, "nonfinite", ("propagate",), ", which ranks agree on in each step"),
      )),
    Rule({"sync": _is_server, "codec": _other_than(NONE)},
         f"{_NOT_YET}: gradients travel to servers exactly", "leave codec out"),
    *(Rule({"sync": _one_of(MEASURED), key: _other_than(needed)},
           f': it compares codec "{AUTO}" in each step with local steps, and both lose something',
           f'set codec = "{AUTO}" and lossy = true, or name when ranks meet, such as sync = "diloco"')
      for key, needed in (("codec", AUTO), ("lossy", True))),
    Rule({"sync": _meets_by_steps, "codec": _one_of(AUTO)}, ", which measures exchanges of each step",
         'name a codec, such as codec = "int4", or leave it out'),
    # -- what only a job knows -------------------------------------------------------------------
    Rule({"zero": _above(0), "elastic": _is_set},
         ": a rank that is lost takes its shards with it, and the others cannot go on from their memory",
         f"leave --min-np and --host-discovery-script out, {_START_AGAIN} (fd.load takes any number); "
         "or set zero = 0"),
    *(Rule({degree: _above(1), "on_failure": _one_of("continue"), "elastic": _is_set},
           ": a rank that is lost takes its part of the model with it",
           f'leave --min-np out, or give it with --restarts 3; or set on_failure = "stop", and {_START_AGAIN}')
      for degree in DIVIDING),
    Rule({"codec": _one_of(AUTO), "on_failure": _one_of("continue"), "elastic": _is_set},
         ": what it has measured is of other ranks", "name a codec, or leave on_failure out"),
    Rule({"precision": _one_of("fp16"), "on_failure": _one_of("continue"), "elastic": _is_set},
         f": one scale of the loss for other ranks{_NOT_YET}", 'use precision = "bf16", or leave on_failure out'),
    Rule({"sync": _other_than(EVERY_STEP), "elastic": _is_set}, f", whose ranks change,{_NOT_YET}",
         f"leave sync out; or {_START_AGAIN}"),
    Rule(_UNEQUAL | {"elastic": _is_set}, f", whose ranks change,{_NOT_YET}", "leave balance out"),
    *(Rule({key: refused, "one_bit_adam": _is_set}, why, f"{instead}, or use torch.optim.Adam")
      for key, refused, why, instead in (
          ("precision", _one_of("fp16"), f", {_AFTER_WARM_UP} that all ranks could judge",
           'use precision = "bf16"'),
          ("bf16_parameters", _is_set, ", which exchanges momentum inside of its step, in the parameters' type",
           "leave bf16_parameters out"),
          ("clip_norm", _other_than(None), f", {_AFTER_WARM_UP} to clip", "leave clip_norm out"),
          ("zero", _above(0), ", which exchanges its momentum whole", "set zero = 0"),
          ("on_failure", _one_of("continue"), ", whose momentum cannot be taken back", 'set on_failure = "stop"'),
      )),
    Rule({"tune": _is_set, "codec": _one_of(AUTO)},
         ": it chooses codec, buckets, route and connections itself, by prediction alone",
         "leave codec out: farandole tune begins with the same predictions, and measures"),
    Rule({"tune": _is_set, "zero": _above(0)}, ": shards lie as the buckets do, and only zero = 0 is tuned",
         "leave zero out"),
    *(Rule({"noise_scale": _is_set, degree: _above(1)}, ": a rank has a part of a gradient",
           "measure with data parallelism alone: the result is the model's and the data's")
      for degree in DIVIDING),
    Rule({"noise_scale": _is_set, "zero": _one_of(MOST_ZERO)},
         ": gradients are divided while backward runs, and no rank has its own",
         "measure with zero = 2 or less: the result is the same"),
    Rule({"noise_scale": _is_set, "sync": _other_than(EVERY_STEP)}, ": ranks exchange no gradients to compare",
         "measure without sync: the result is the model's and the data's"),
    *(Rule({"noise_scale": _is_set, key: changes}, ": it changes the norm of the mean gradient, which is measured",
           'measure with codec "none", "bf16", "fp16" or "int8": the result is the same')
      for key, changes in (
          ("codec", _changes_norm), ("codec_for", lambda codecs: any(map(_changes_norm, codecs.values()))))),
    *(Rule({"horovod": _is_set, key: _other_than(default)}, ", which is given no model",
           f"in the script: {_INSTEAD_OF_KEYS.get(key, _BY_DISTRIBUTE)}")
      for key, default in _OF_THE_MODEL.items()),
    *(Rule({front_end: _is_set, key: refused}, ", which does not train a model that is divided so",
           f"leave it out, or write the loop with {_BY_DISTRIBUTE}")
      for front_end, most_zero in (("trainer", MOST_ZERO), ("accelerator", MOST_ZERO), ("lightning", 0))
      for key, refused in (*((degree, _other_than(1)) for degree in DIVIDING), ("zero", _above(most_zero)))
      if key != "zero" or most_zero < MOST_ZERO),
    *(Rule({"resume": _is_set, key: refused, "zero": _above(0)},
           ": what it keeps beside the weights is not in a checkpoint of the Trainer",
           f"leave {key} out, or train by a loop with farandole.save and farandole.load")
      for key, refused in (("weight_codec", _other_than(NONE)), ("bf16_parameters", _is_set))),
    Rule({"save_state": _is_set, "zero": _above(0)},
         ": the optimizer's state is sharded over ranks, and Accelerate would write that of one rank",
         "call farandole.save and farandole.load on all ranks; save_model and get_state_dict give the whole "
         "model, on all ranks too"),
)
# fmt: on
"""In the order in which they are asked: a key by itself before what it goes with."""


def broken(values: Values) -> Rule | None:
    """Return the first rule that refuses these keys, degrees and facts; None if none does.

    A rule that asks for a key that is not there does not refuse.
    """
    return next((rule for rule in RULES if rule.refuses(values)), None)


def allows(key: str, value: Any, values: Values) -> bool:
    """Return whether no rule on `key` refuses `value` beside `values`."""
    asked = {**values, key: value}
    return not any(rule.refuses(asked) for rule in RULES if key in rule.values)


def check(values: Values) -> None:
    """Raise `PlanError` for keys, degrees and facts that cannot be together."""
    rule = broken(values)
    if rule is not None:
        raise PlanError(rule.said(values), remedy=rule.remedy)
