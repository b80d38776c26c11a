"""How a seed becomes a program: what is drawn, and what is taken out because it does not go together."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

from .model import OPTIMIZERS
from .program import BATCH, DEGREES, Layout, PlanProgram
from .specials import SPECIALS

ODD = 0.04
"""Share of the layouts that are left as drawn: what is documented as refused is among them."""
SPECIAL = 0.5
"""Share of the programs in which something else is special than degrees and stages."""
_RECIPE = {"*.query": "columns", "*.key": "columns", "*.value": "columns", "*.out": "rows"}


def draw(seed: int) -> PlanProgram:
    """Return program `seed`."""
    dice = random.Random(seed)
    special = dice.choice(SPECIALS) if dice.random() < SPECIAL else None
    program = _exact(seed, dice)
    return settled(program if special is None else special(program, dice))


def _exact(seed: int, dice: random.Random) -> PlanProgram:
    pick = dice.choice

    def chance(share: float) -> bool:
        return dice.random() < share

    loss = pick(("mean", "mean", "ignore", "smooth", "classes", "logits"))
    program = PlanProgram(
        seed,
        layers=pick((2, 2, 3, 4)),
        heads=pick((2, 4)),
        key_heads=pick((2, 2, 1)),
        mix=pick(("sdpa", "sdpa", "sdpa", "mha", "encoder", "none")),
        feed=pick(("gelu", "gated", "experts", "experts")),
        experts=pick((4, 8)),
        top_k=pick((1, 2)),
        capacity=pick((None, None, None, 1.0)),
        shared=pick((0, 8)),
        norm=pick(("layer", "rms")),
        head_norms=chance(0.3),
        zero_branches=chance(0.25),
        causal=chance(0.7),
        bias=chance(0.8),
        places=pick(("input", "inside", "none")),
        scale=chance(0.3),
        buffer=chance(0.3),
        unused=chance(0.15),
        tied=chance(0.25),
        twice=chance(0.08),
        far=chance(0.2),
        warms=chance(0.1),
        skip=pick(("none",) * 8 + ("step", "rank")),
        frozen=pick(("",) * 5 + ("words.*", "blocks.1.*", "*norm*")),
        late=pick(("",) * 4 + ("blocks.1.*", "*norm*", "*feed*", "words.*")),
        late_by=pick(("loop", "plan")),
        words=pick((13, 12, 16)),
        loss=loss,
        penalty=pick((0.0,) * 5 + (0.05,)),
        balance=pick((0.0, 0.0, 0.05)),
        z=pick((0.0, 0.0, 0.01)),
        optimizer=pick(("sgd", "adamw", *OPTIMIZERS)),
        groups=pick((1, 1, 2)),
        optimizers=2 if chance(0.1) else 1,
        scheduler=pick(("none", "none", "step", "exponential")),
        early=chance(0.7),
        clip=pick(("none", "none", "plan", "loop")),
        loop=pick(("step", "plain", "plain")),
        passes=pick((1, 1, 2)),
        accumulate=pick(("none", "plan", "loop")),
        ragged=chance(0.25),
        evaluate=chance(0.25),
        save_at=pick((1, 2)),
    )
    ranks = pick((2,) * 7 + (4,) * 2 + ((8,) if chance(0.15) else (2,)))
    others = pick((1, 2, 2, 2, 2, 4))
    program = dataclasses.replace(
        program,
        first=_layout(program, dice, ranks),
        then=_layout(program, dice, others) if chance(0.45) else None,
    )
    return settled(program)


def _layout(program: PlanProgram, dice: random.Random, ranks: int) -> Layout:
    """Return a layout; most of them without what is documented as refused."""
    names = [*DEGREES, *(["expert"] if program.feed == "experts" else ())]
    for _ in range(200):
        sizes = Counter(dice.choice(names) for _ in range(ranks.bit_length() - 1))
        keys: dict[str, Any] = {name: 2**times for name, times in sorted(sizes.items())}
        stage = dice.choice((0, 0, 1, 2, 3))
        if "shard" in keys:
            stage = 3 if "data" in keys else dice.choice((1, 2, 3))
        if stage:
            keys["zero"] = stage
        layout = Layout(ranks, keys=keys)
        if dice.random() < ODD or _fits(program, layout):
            break
    else:
        layout = Layout(ranks)
    _draw_keys(program, layout, dice, keys)
    is_host = ranks == 4 and layout.zero == 3 and {*keys} <= {"data", "zero", "recompute"} and dice.random() < 0.5
    if is_host:
        keys = {name: value for name, value in keys.items() if name != "data"} | {"shard_within": "host"}
    return Layout(ranks, 2 if is_host else 1, keys)


def _fits(program: PlanProgram, layout: Layout) -> bool:
    """Return whether the documentation promises it."""
    expert, pipeline, context = (layout.degree(each) for each in ("expert", "pipeline", "context"))
    return not (
        layout.samples > BATCH // 2
        or (expert > 1 and (layout.zero in (1, 2) or program.feed != "experts" or expert > program.experts))
        or pipeline > program.layers
        or (pipeline > 1 and layout.zero and program.tied)
        or context > 2
        or layout.degree("tensor") > min(program.heads, program.key_heads)
        or (context > 1 and program.mix == "encoder" and program.causal)
        or (context > 1 and program.capacity is not None)
    )


def _draw_keys(program: PlanProgram, layout: Layout, dice: random.Random, keys: dict[str, Any]) -> None:
    """Draw what belongs to the degrees and the stage into `keys`."""
    pick = dice.choice
    if "tensor" in keys:
        if program.mix == "sdpa" and dice.random() < 0.75:
            keys["tensor_recipe"] = _RECIPE
        is_divided = program.mix != "sdpa" or "tensor_recipe" in keys
        if program.capacity is None and dice.random() < (0.4 if is_divided else ODD):
            keys["sequence_parallel"] = True
    if "pipeline" in keys:
        _draw_pipeline(program, layout, dice, keys)
    else:
        keys["micro_batches"] = pick((1, 1, 2))
    if "context" in keys:
        keys["context_kind"] = pick(("auto", "ring", "heads"))
    if dice.random() < 0.25:
        keys["recompute"] = pick(("blocks", ("blocks.0", "blocks.1*")))
    if layout.zero < 3:
        if dice.random() < 0.4:
            keys["bucket_bytes"], keys["first_bucket_bytes"] = pick(((500, 300), (5000, 1000)))
        if dice.random() < 0.2:
            keys["route"] = "flat"
        if layout.zero and dice.random() < 0.25:
            keys["overlap_gather"] = True
    has_states = program.optimizer in ("momentum", "adamw", "adagrad", "rmsprop")
    if has_states and {*keys} <= {"data", "shard", "zero", "micro_batches"} and dice.random() < 0.15:
        keys["offload"] = "disk"


def _draw_pipeline(program: PlanProgram, layout: Layout, dice: random.Random, keys: dict[str, Any]) -> None:
    ranks = layout.degree("pipeline")
    schedule = dice.choice(("gpipe", "1f1b", "1f1b", "interleaved", "zb-h1", "zb-v"))
    if layout.zero == 3 and schedule.startswith("zb"):
        schedule = "gpipe"
    if schedule in ("interleaved", "zb-v") and program.layers < 2 * ranks:
        schedule = "1f1b"
    stages = ranks * (2 if schedule in ("interleaved", "zb-v") else 1)
    keys |= {"schedule": schedule, "micro_batches": dice.choice((ranks, 2 * ranks))}
    if stages <= program.layers and dice.random() < 0.9:  # measuring layers takes time
        cuts = sorted(dice.sample(range(1, program.layers), stages - 1))
        keys["pipeline_cuts"] = tuple(f"blocks.{cut}" for cut in cuts)


# -- what goes together --------------------------------------------------------------------------------


def settled(program: PlanProgram) -> PlanProgram:
    """Return `program` without what does not go together, in torch or by the documentation."""
    for rule in (_of_model, _of_loop, _of_layouts):
        program = dataclasses.replace(program, **rule(program))
    return program


def _of_model(program: PlanProgram) -> dict[str, Any]:
    change: dict[str, Any] = {}
    if program.mix == "encoder":
        change |= {"feed": "gelu", "zero_branches": False, "head_norms": False}
    if program.mix != "sdpa":
        change |= {"head_norms": False, "key_heads": program.heads}
    change["key_heads"] = min(change.get("key_heads", program.key_heads), program.heads)
    if change.get("feed", program.feed) != "experts":
        change |= {"balance": 0.0, "z": 0.0, "capacity": None}
    elif program.skip == "rank":
        change["skip"] = "step"
    if program.tied and program.frozen == "words.*":
        change["frozen"] = ""
    if program.late and change.get("frozen", program.frozen):
        change["frozen"] = ""
    return change


def _of_loop(program: PlanProgram) -> dict[str, Any]:
    change: dict[str, Any] = {}
    layouts = [each for each in (program.first, program.then) if each is not None]
    if any(each.degree("pipeline") > 1 for each in layouts):
        change["loop"] = "step"
        if program.skip == "rank":
            change["skip"] = "step"
    loop = change.get("loop", program.loop)
    if loop == "step":
        change |= {"penalty": 0.0}
    if program.passes == 1 or (loop == "step" and program.accumulate == "plan"):
        change["accumulate"] = "none"
    if program.skip != "none":
        change |= {"balance": 0.0, "z": 0.0}
    if program.ragged or program.loss in ("ignore", "smooth", "classes"):
        change |= {"balance": 0.0, "z": 0.0}
    if program.capacity is not None:
        change |= {"evaluate": False}
        if any(each.degree("context") > 1 for each in layouts):
            change["capacity"] = None
    return change


def _of_layouts(program: PlanProgram) -> dict[str, Any]:
    change: dict[str, Any] = {}
    layouts = [each for each in (program.first, program.then) if each is not None]
    if any(each.degree(name) > 1 for each in layouts for name in ("tensor", "pipeline")):
        change["late_by"] = "loop"
    if any(each.zero == 3 and each.ranks > 1 for each in layouts) and program.skip == "rank":
        change["skip"] = "step"
    return change
