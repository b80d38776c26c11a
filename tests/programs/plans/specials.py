"""What else may be special in a program than degrees and stages, each drawn on top of a drawn program."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from .program import DEGREES, Layout, PlanProgram


def _adapters(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """Frozen weights in few bits, with adapters."""
    program = dataclasses.replace(
        program, adapters=True, mix=dice.choice(("sdpa", "none")), feed=dice.choice(("gelu", "gated")), tied=False,
        frozen="words.*|places.*|*norm*|blocks.*weight|blocks.*bias", late="", penalty=0.0, unused=False,
        scale=False, single=True, optimizer=dice.choice(("sgd", "adamw")),
    )  # fmt: skip
    keys = dice.choice(({}, {"frozen_codec": "int8"}, {"frozen_codec": "int4"}))
    return _with_keys(program, keys, without=("tensor", "expert"))


def _delayed(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """Two batches in a pipeline at once."""
    ranks = dice.choice((2, 2, 4))
    layers = max(2, program.layers)
    keys = {
        "pipeline": 2, "schedule": "1f1b", "weight_versions": 2, "micro_batches": dice.choice((2, 4)),
        "pipeline_cuts": (f"blocks.{dice.randrange(1, layers)}",),
    }  # fmt: skip
    then = None if dice.random() < 0.5 else Layout(2, keys=dice.choice((keys, {"zero": 2}, {"pipeline": 2})))
    return dataclasses.replace(
        program, first=Layout(ranks, keys=keys), then=then, layers=layers, tied=False, ragged=False, skip="none",
        loss=dice.choice(("mean", "logits")), balance=0.0, z=0.0, clip=dice.choice(("none", "plan")), loop="step",
        passes=1, scheduler="none", twice=False, feed=dice.choice(("gelu", "gated")), capacity=None, steps=4,
        late="", places="input",
    )  # fmt: skip


def _loaded(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """Batches of a loader, whose shares may be unequal."""
    program = _with_keys(program, {}, without=("tensor", "pipeline", "expert", "context", "micro_batches"))
    shares = [dice.choice(("none", "speed", "uneven")) for _ in program.layouts]
    layouts = [
        layout if share == "none" or (share == "speed" and layout.zero == 3) else dataclasses.replace(
            layout,
            keys={**layout.keys, "balance": ",".join(str(dice.randint(1, 3)) for _ in range(layout.ranks))
            if share == "uneven" else share, "overlap_gather": False},
        ) for layout, share in zip(program.layouts, shares, strict=True)
    ]  # fmt: skip
    return dataclasses.replace(
        program, loader=True, first=layouts[0], then=layouts[1] if len(layouts) > 1 else None, ragged=False,
        loss=dice.choice(("mean", "logits")), loop="plain", skip="none", balance=0.0, z=0.0, evaluate=False,
    )  # fmt: skip


def _served(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """Servers that hold the parameters, and wait for all ranks."""
    keys = {"sync": "server", **dice.choice(({}, {"route": "flat"}))}
    return dataclasses.replace(
        program, first=Layout(2, keys=keys), late="", clip="none", accumulate="none", passes=1, tied=False,
        loop="plain", ragged=False, loss=dice.choice(("mean", "logits")),
        optimizer=dice.choice(("sgd", "momentum", "adamw")), optimizers=1, penalty=0.0, skip="none",
    )  # fmt: skip


def _with_keys(program: PlanProgram, keys: dict[str, Any], *, without: tuple[str, ...]) -> PlanProgram:
    """Return `program` with `keys` in its layouts; where these have a degree of `without`, samples are divided."""
    layouts = []
    for layout in program.layouts:
        degrees = [name for name in DEGREES if name in without and layout.degree(name) > 1]
        kept = {name: word for name, word in layout.keys.items() if name not in without}
        if degrees:
            kept = {name: kept[name] for name in ("zero", "route", "recompute") if name in kept}
        layouts.append(dataclasses.replace(layout, keys={**kept, **keys}))
    return dataclasses.replace(program, first=layouts[0], then=layouts[1] if len(layouts) > 1 else None)


def _halves(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """Forward passes in float16, and an infinity on one rank."""
    without = ("pipeline", "expert", "micro_batches")
    program = _with_keys(program, {"precision": "fp16"}, without=without)
    return dataclasses.replace(
        program, kind="fp16", single=True, feed=dice.choice(("gelu", "gated")), loop="plain",
        loss=dice.choice(("mean", "ignore")), passes=1, accumulate="none", optimizers=1,
        optimizer=dice.choice(("sgd", "momentum", "adamw")),
        balance=0.0, z=0.0, penalty=0.0, skip="none", evaluate=False, clip=dice.choice(("none", "plan")), late="",
        capacity=None,
    )  # fmt: skip


def _narrow(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """Passes, or parameters too, in bfloat16: the bits of one stage are those of another, computed again or not.

    What is added up in another order has other bits, so there is no far connection. Open: what a buffer in float32
    widens (`buffer`) is refused by LayerNorm, in torch's words.
    """
    keys = {"precision": "bf16", "bf16_parameters": dice.choice((True, False))}
    # A block that runs twice is cast twice where it is computed again: its gradients are added in float32.
    again = ("none",) if program.twice else ("none", "blocks")
    layouts = [
        Layout(2, keys={**keys, "zero": dice.choice((0, 1, 2, 3)), "recompute": dice.choice(again)}) for _ in "ab"
    ]
    return dataclasses.replace(
        program, kind="bf16", single=True, buffer=False, far=False,
        first=layouts[0], then=layouts[1], feed=dice.choice(("gelu", "gated")),
        loss=dice.choice(("mean", "logits")), loop="plain", passes=1, accumulate="none", clip="none", late="",
        balance=0.0, z=0.0, penalty=0.0, skip="none", evaluate=False, ragged=False, tied=False, capacity=None,
    )  # fmt: skip


def _dropping(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """Dropout: ranks with the same part agree, and what is computed again drops the same."""
    program = _with_keys(program, {}, without=("context",))
    mix = "sdpa" if program.mix == "sdpa" else "none"
    first = program.first
    left_out = ("recompute", "offload", "tensor_recipe") if program.mix != "sdpa" else ("recompute", "offload")
    keys = {name: word for name, word in first.keys.items() if name not in left_out}
    first = dataclasses.replace(first, keys=keys)
    then = dataclasses.replace(first, keys={**keys, "recompute": dice.choice(("blocks", ("blocks.1*",)))})
    return dataclasses.replace(
        program, kind="dropout", first=first, then=then, dropout=0.2, mix=mix, skip="none", evaluate=False, steps=2
    )


def _packed(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """Gradients by a codec, at each stage."""
    stage = dice.choice((0, 1, 2, 3))
    codecs: tuple[str, ...] = ("int8", "bf16", "fp16") if stage == 3 else ("int8", "int4", "bf16", "fp16", "fp8")
    if not stage:
        codecs += ("sign", "topk:0.1", "powersgd:2", "randomk:0.2", "threshold:0.001")
    keys: dict[str, Any] = {"codec": dice.choice(codecs)}
    if stage:
        keys["zero"] = stage
    if stage < 3:
        keys |= {"route": "flat", "bucket_bytes": dice.choice((3000, 4 * 2**20)), "first_bucket_bytes": 1000}
    return dataclasses.replace(
        program, kind="codec", single=True, width=64, layers=2, first=Layout(dice.choice((2, 2, 3)), keys=keys),
        then=None, mix="none", feed=dice.choice(("gelu", "gated")), loss="mean", loop="plain", passes=1,
        accumulate="none", clip="none", late="", balance=0.0, z=0.0, penalty=0.0, skip="none", evaluate=False,
        ragged=False, optimizer="sgd", groups=1, optimizers=1, frozen="", tied=False, unused=False, capacity=None,
    )  # fmt: skip


def _tabled(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """A table of rows at servers."""
    kind = dice.choice(("sgd", "adamw", "adagrad"))
    return dataclasses.replace(program, kind="rows", first=Layout(2), then=None, loss="mean", optimizer=kind)


def _local(program: PlanProgram, dice: random.Random) -> PlanProgram:
    """Ranks that meet every H steps."""
    kind = dice.choice(
        ("local:H=2", "local:H=3", "diloco:H=2", "diloco:H=2,nesterov=false", "local:H=2,overlap=1")
    )
    return dataclasses.replace(
        program, kind="local", first=Layout(dice.choice((2, 2, 4)), keys={"sync": kind}), then=None, steps=5,
        feed=dice.choice(("gelu", "gated")), loss=dice.choice(("mean", "logits")), loop="plain", passes=1,
        accumulate="none", clip=dice.choice(("none", "plan", "loop")), late="", balance=0.0, z=0.0, penalty=0.0,
        skip="none", evaluate=False, ragged=False, optimizers=1, capacity=None,
    )  # fmt: skip


SPECIALS = (
    _adapters, _delayed, _loaded, _served, _halves, _halves, _narrow, _dropping, _packed, _packed, _tabled, _local,
)  # fmt: skip
