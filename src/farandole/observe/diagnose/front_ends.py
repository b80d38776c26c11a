"""Findings of a training whose loop or exchange is not ours, in its words: Keras, transformers, DDP and others.

What costs how much is the same whatever trains; what to do about it is not. A fix that this front end has no place
for (a plan key that it refuses, an argument of torch's loader or optimizer) becomes its own way to do the same,
and is left out where there is none.

[Note: a script without fd.init] A model in one of torch's wrappers is recorded without a line in the script, one
that calls `fd.init` is not. So what a fix calls there comes with its import and `fd.record`, which also times the
loader; a plan's key changes only what `fd.distribute` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...core.vocabulary.events import CHECKPOINT, DATA, DDP, END_OF_EPOCH, EVALUATION, FSDP2, LIGHTNING, TRAINER
from ...core.vocabulary.rules import MOST_ZERO
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.units import parse_bytes
from .finding import Finding, Fix, distribute_by, format_cost
from .step_table import StepTable

_ON_TORCH = "keras on torch"
_AHEAD = (
    Fix(
        "let tf.data make batches ahead of time and beside each other",
        "dataset = dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)",
    ),
    Fix("or do less for a sample: decode and resize once and keep the result (dataset.cache()); a PyDataset of "
        "Keras takes workers=4, use_multiprocessing=True"),
)  # fmt: skip
_RARER_EVALUATION = Fix("evaluate less often or on fewer samples: validation_freq=, validation_steps= of fit")
_RARER_SAVES = re.compile(rf"do {CHECKPOINT} .*, every (\d+) steps")
_HELD = re.compile(r"with fd\.accumulate\((\(i \+ 1\) % (\d+) > 0)?\):\n    loss\.backward\(\)")
"""The passes that `held_passes` and `find_communication` write."""
_INIT = "import farandole as fd\nfd.init()"
_RECORD = "fd.record(model, optimizer, loader)  # before the loop"
_CALLS_OURS = re.compile(r"^[^#\n]*\bfd\.", re.MULTILINE)
_RARER_CALLBACKS = Fix("save on rank 0 alone, and not in every epoch: ModelCheckpoint(save_best_only=True)")


def in_words_of(finding: Finding, table: StepTable) -> Finding:
    """Return a finding with fixes that its front end knows."""
    front_end = table.front_end
    if (loop := _LOOPS.get(table.loop)) and finding.kind == "other":
        cost = format_cost(finding.seconds, finding.share)
        title = f"callbacks, and the loop of {table.loop}, between two steps take {cost}"
        evidence = tuple(each for each in finding.evidence if "fd.shard" not in each)
        return replace(finding, title=title, evidence=evidence, fixes=(Fix("do less in callbacks and for logs"),))
    if loop:
        named = [_of_loop(fix, loop, is_stock=bool(table.wrapper)) for fix in finding.fixes]
        return replace(finding, fixes=tuple(filter(None, named)))
    if not front_end:
        return _of_wrapper(finding, table.wrapper) if table.wrapper else finding
    is_on_torch = front_end == _ON_TORCH
    if finding.kind == "other" and front_end != "tensorflow":
        return _of_keras_loop(finding)
    if (finding.kind == "input" or (finding.kind == "straggler" and finding.phase == DATA)) and not is_on_torch:
        return replace(finding, fixes=_AHEAD)
    if finding.kind in ("launch", "memory") and finding.fixes and _names_torch(finding.fixes) and not is_on_torch:
        return replace(finding, fixes=())
    fixes = [_translate(fix, front_end) for fix in finding.fixes if "fd.prefetch" not in fix.paste]
    if finding.kind == "pause" and finding.phase == EVALUATION:
        fixes[1:] = [_RARER_EVALUATION]
    if finding.kind == "pause" and finding.phase == CHECKPOINT:
        fixes = [fix for fix in fixes if "fd.Checkpointer" not in fix.paste]
    if finding.kind == "pause" and finding.phase == END_OF_EPOCH:
        fixes = [replace(_RARER_CALLBACKS, gain=finding.fixes[0].gain)]
    return replace(finding, fixes=tuple(fixes))


class _Loop(NamedTuple):
    """What a loop of torch calls its ways to do the same."""

    ours: str
    """What makes the exchange ours."""
    saves: str
    """With the number of steps between two."""
    holds: str
    """With the number of passes of a step."""
    loader: str = ""
    """Arguments of the loader; empty: the script makes it."""
    fused: str = ""
    is_data_alone: bool = False
    """Whether what makes the exchange ours shards nothing."""


_IN_ARGUMENTS = "  # arguments of TrainingArguments"
_LOOPS = {
    TRAINER: _Loop(
        "FarandoleTrainer instead of Trainer",
        f'save_strategy="steps", save_steps={{}}{_IN_ARGUMENTS}',
        f"gradient_accumulation_steps={{}}{_IN_ARGUMENTS}",
        _IN_ARGUMENTS,
        f'optim="adamw_torch_fused"{_IN_ARGUMENTS}',
    ),
    LIGHTNING: _Loop(
        'strategy=FarandoleStrategy() instead of "ddp"',
        "every_n_train_steps={}  # argument of ModelCheckpoint",
        "accumulate_grad_batches={}  # argument of Trainer",
        is_data_alone=True,
    ),
}


def _of_loop(fix: Fix, loop: _Loop, *, is_stock: bool) -> Fix | None:
    """Return a fix in the words of a loop; None where it has no place for it."""
    keys = _plan_keys(fix)
    if "accumulate" in keys:
        return replace(fix, paste=loop.holds.format(keys["accumulate"]), changes={})
    if is_stock and keys:
        if loop.is_data_alone and {"zero", "weight_codec"} & {*keys}:
            return None
        return replace(fix, what=f"{fix.what}, with {loop.ours}")
    if "fd.Checkpointer" in fix.paste or "fd.prefetch" in fix.paste:
        return None
    if rarer := _RARER_SAVES.search(fix.what):
        return replace(fix, paste=loop.saves.format(rarer[1]))
    if held := _HELD.match(fix.paste):
        return replace(fix, paste=loop.holds.format(held[2] or 2))
    code, _, of = fix.paste.partition("  # argument")
    if loop.loader and of.endswith("of the DataLoader"):
        named = ", ".join(f"dataloader_{each}" for each in code.split(", "))
        return replace(fix, paste=named.replace("dataloader_batch", "per_device_train_batch") + loop.loader)
    if loop.fused and of.endswith(".AdamW") and code == "fused=True":
        return replace(fix, paste=loop.fused)
    return fix


def _of_wrapper(finding: Finding, wrapper: str) -> Finding:
    """Return a finding with fixes for a model in torch's `wrapper`. See [Note: a script without fd.init]."""
    evidence = tuple(each.replace("fd.shard or fd.record", "fd.record") for each in finding.evidence)
    return replace(finding, evidence=evidence, fixes=tuple(_wrapped(fix, wrapper) for fix in finding.fixes))


def _wrapped(fix: Fix, wrapper: str) -> Fix:
    fix = replace(fix, what=fix.what.replace("fd.shard(loader, evaluate=True)", "a DistributedSampler"))
    settings = _plan_keys(fix)
    if held := _HELD.match(fix.paste):
        return replace(fix, paste=_without_exchange(held[1] or "True", wrapper) + fix.paste[held.end() :])
    if "accumulate" in settings:
        condition = f"(i + 1) % {settings['accumulate']} > 0"
        return replace(fix, paste=_without_exchange(condition, wrapper), changes={})
    if "bucket_bytes" in settings and wrapper == DDP:
        size = parse_bytes(settings["bucket_bytes"]) // 2**20
        return replace(fix, paste=f"bucket_cap_mb={size}  # argument of {DDP}", changes={})
    if wrapper == FSDP2 and settings:
        if settings.get("zero", MOST_ZERO) != MOST_ZERO:
            kept = "reshard_after_forward=False  # argument of fully_shard, for each block"
            what = "parameters that stay whole from the forward to the backward pass: they travel once a step"
            return replace(fix, what=what, paste=kept, changes={})
        settings = {"zero": MOST_ZERO, **settings}
    if settings:
        call_of_torch = "fully_shard" if wrapper == FSDP2 else wrapper
        what = f"{fix.what}, with fd.distribute instead of {call_of_torch}"
        return replace(
            fix, what=what, paste=f"{_INIT}  # instead of {call_of_torch}\n{distribute_by(settings)}\n{_RECORD}"
        )
    if fix.paste == "loader = fd.shard(loader)":
        return replace(
            fix, paste="sampler=DistributedSampler(dataset)  # argument of the DataLoader, not shuffle="
        )
    if "fd.prefetch" in fix.paste:
        return replace(fix, paste=f"import farandole as fd\n{fix.paste}")
    if _CALLS_OURS.search(fix.paste):
        return replace(fix, paste=f"import farandole as fd\n{_RECORD}\n{fix.paste}")
    return fix


def _plan_keys(fix: Fix) -> dict[str, Any]:
    return {key: value for key, value in fix.changes.items() if key in Plan.__dataclass_fields__}


def _without_exchange(condition: str, wrapper: str) -> str:
    """Return a pass whose gradients the wrapper does not exchange where the condition holds."""
    if wrapper == FSDP2:
        return f"model.set_requires_gradient_sync(not ({condition}))\nloss.backward()"
    # Whether a pass is exchanged is decided in its forward pass.
    held, imports = "model.no_sync()", ""
    if condition != "True":
        held, imports = f"{held} if {condition} else contextlib.nullcontext()", "import contextlib\n"
    return f"{imports}with {held}:\n    loss = loss_function(model(inputs), targets)\n    loss.backward()"


def _translate(fix: Fix, front_end: str) -> Fix:
    changes = dict(fix.changes)
    if held := _HELD.match(fix.paste):
        changes["accumulate"] = int(held[2] or 2)
    if "accumulate" in changes:
        passes = changes["accumulate"]
        return replace(fix, paste=f"backward_passes_per_step={passes}  # argument of hvd.DistributedOptimizer")
    if "congestion_control" in changes:
        paste = f"sysctl -w net.ipv4.tcp_congestion_control={changes['congestion_control']}  # on every host"
        return replace(fix, paste=paste, changes={})
    if "loader_batch" in changes:
        return replace(fix, paste=f"batch_size={changes['loader_batch']}  # argument of fit, or of dataset.batch")
    if fix.paste == "loader = fd.shard(loader)":
        return replace(fix, paste="import farandole.keras\ndataset = farandole.keras.shard(dataset)")
    return fix


def _names_torch(fixes: Sequence[Fix]) -> bool:
    return any("torch" in fix.paste.lower() for fix in fixes)


def _of_keras_loop(finding: Finding) -> Finding:
    """Return the time between two batches, which is that of callbacks and of Keras's own loop."""
    title = (
        f"callbacks, and Keras's own loop, between two batches take {format_cost(finding.seconds, finding.share)}"
    )
    fix = Fix(
        "do less in on_train_batch_begin and on_train_batch_end, and show progress by epoch; with "
        "steps_per_execution several batches run at once",
        "model.compile(..., steps_per_execution=8); model.fit(..., verbose=2)",
        finding.fixes[0].gain if finding.fixes else None,
    )  # fmt: skip
    if finding.evidence:
        evidence = tuple(each for each in finding.evidence if "fd.shard" not in each)
        return replace(finding, title=title, evidence=evidence, fixes=(fix,))
    return replace(finding, title=title, fixes=(fix,))
