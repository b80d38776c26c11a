"""What a random training program is, and how a seed becomes one.

A `Program` is plain data: the modules of a model, what the loop does with them, and the plan. The same value
is played by every rank and by one process (`play`), and printed when the two differ.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

LOSSY = ("bf16", "fp16", "int8", "int4", "sign", "topk:0.1", "threshold:0.01", "randomk:0.2", "powersgd:2")
"""Codecs that keep what they did not send."""
BLOCKS = (
    "linear", "linear", "tied", "layer_norm", "conv", "batch_norm", "embedding", "sparse_embedding", "branch",
    "frozen", "thawed", "unused", "transposed", "scalar", "empty", "mixed", "complex", "weight_norm",
)  # fmt: skip
REFUSABLE = ("assign", "hand_written", "late_parameter", "replaced")
"""What a loop may do that is refused, where it cannot be made right."""
DISTURBANCES = (
    "double_float", "channels_last", "grad_data", "grad_clone", "grad_times_one", "keep_grads", "param_data",
    "param_set", "load_state", "to_cpu", "copy_model", "evaluate", "throw_away", "grad_detach", *REFUSABLE,
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """One training program. The defaults are the simplest one."""

    seed: int
    ranks: int = 2
    blocks: tuple[str, ...] = ("linear",)
    """What the model is made of, in order."""
    width: int = 8
    dtype: str = "float64"
    checkpointing: str = "none"
    """"none", "plain" or "reentrant" activation checkpointing of all blocks."""
    compiled: str = "none"
    """"none", or "before" or "after" `distribute`."""
    penalty: bool = False
    """The loss has the gradient of the input in it: backward goes through backward."""
    pair: bool = False
    """Two models with an optimizer each: the second one judges what the first one makes, and they take turns."""
    optimizer: str = "sgd"
    """"sgd", "momentum", "adamw", "adagrad", "fused", "lbfgs" or "two_passes" (a closure that is called twice)."""
    optimizers: int = 1
    """How many share the parameters."""
    closure: bool = False
    passes: int = 1
    """Backward passes a step."""
    accumulate: bool = False
    """The plan knows of the passes."""
    zero: str = "none"
    """How gradients are cleared: "none", "zeros", or "model"."""
    clip: str = "none"
    """"none", by the "loop" or by the "plan"."""
    scaler: str = "none"
    """"none", "steady", "growing" (doubles in each step) or "overflow": in one step one rank's are infinite."""
    data: str = "even"
    """"even", or a sharded loader: "uneven", or "ahead", which fetches one batch more than it uses."""
    disturbance: str = "none"
    """What else the loop does, in every other step."""
    route: str = "auto"
    codec: str = "none"
    feedback: bool = True
    bucket_bytes: int = 4 * 2**20
    first_bucket_bytes: int = 2**20
    connections: int = 1
    steps: int = 5
    stage: int = 0
    """Of ZeRO: the plan's `zero`."""

    @property
    def is_lossy(self) -> bool:
        """Whether single gradients differ from those of one process."""
        return self.codec != "none"

    @property
    def may_refuse(self) -> bool:
        """Whether an error of Farandole's, on all ranks, is as good as the right result."""
        takes_closure = self.closure or self.optimizer in ("lbfgs", "two_passes")
        return (
            self.disturbance in REFUSABLE
            or (takes_closure and (self.accumulate or self.clip == "plan"))
            or (self.checkpointing == "reentrant" and "tied" in self.blocks)
            or (self.clip == "plan" and self.optimizers > 1 and self.scaler != "none")
        )

    def changes(self) -> dict[str, object]:
        """Return the fields that are not those of the simplest program, for a person."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        }


def draw(seed: int) -> Program:
    """Return program `seed`, the same for ever (as long as this file is)."""
    pick = random.Random(seed)

    def chance(share: float) -> bool:
        return pick.random() < share

    blocks = tuple(pick.choice(BLOCKS) for _ in range(pick.randint(1, 4)))
    if blocks.count("batch_norm") and chance(0.3):
        blocks = (*blocks, "linear")
    lossy = chance(0.3)
    optimizer = pick.choice(("sgd", "sgd", "momentum", "adamw", "adagrad", "fused", "lbfgs", "two_passes"))
    program = Program(
        seed,
        ranks=3 if chance(0.2) else 2,
        blocks=blocks,
        width=64 if lossy else pick.choice((8, 8, 27)),
        dtype=pick.choice(("float64", "float32")),
        checkpointing=pick.choice(("none",) * 6 + ("plain", "reentrant")),
        compiled=pick.choice(("none",) * 28 + ("before", "after")),
        penalty=chance(0.08),
        pair=chance(0.12),
        optimizer=optimizer,
        optimizers=2 if chance(0.2) else 1,
        closure=chance(0.12),
        passes=pick.choice((1, 1, 1, 2, 3)),
        accumulate=chance(0.5),
        zero=pick.choice(("none", "zeros", "model")),
        clip=pick.choice(("none",) * 3 + ("loop", "plan")),
        scaler=pick.choice(("none",) * 5 + ("steady", "overflow", "growing")),
        data=pick.choice(("even", "even", "uneven", "ahead")),
        disturbance="none" if chance(0.4) else pick.choice(DISTURBANCES),
        route=pick.choice(("auto", "auto", "auto", "flat", "flat", "flat")),
        codec=pick.choice((*LOSSY, "auto")) if lossy else pick.choice(("none",) * 7 + ("auto",)),
        feedback=chance(0.8),
        bucket_bytes=pick.choice((200, 3000, 4 * 2**20)),
        first_bucket_bytes=pick.choice((100, 1000, 2**20)),
        connections=pick.choice((1, 1, 1, 2)),
        steps=pick.choice((4, 5, 7)),
    )
    return sensible(program)


def draw_sharded(seed: int) -> Program:
    """Return program `seed` with ZeRO stage 1 or 2, without what these refuse."""
    program = draw(seed)
    change: dict[str, object] = {"stage": 1 + seed % 2, "codec": "none", "closure": False}
    if program.optimizer in ("lbfgs", "two_passes"):
        change["optimizer"] = "adamw"
    blocks = tuple("embedding" if block == "sparse_embedding" else block for block in program.blocks)
    return sensible(dataclasses.replace(program, blocks=blocks, **change))  # type: ignore[arg-type]


def sensible(program: Program) -> Program:
    """Return `program` without what does not go together, in torch or by what it means."""
    for rule in (_model, _loop, _torch, _data, _precision, _torch):
        program = rule(program)
    return program


def _model(program: Program) -> Program:
    change: dict[str, object] = {}
    blocks = program.blocks
    if "batch_norm" in blocks:  # needs the joined batch, so every rank must go the same way
        blocks = tuple(block for block in blocks if block != "branch")
        change |= {"checkpointing": "none", "compiled": "none", "penalty": False}
    if program.pair:
        blocks = tuple(block for block in blocks if block not in ("batch_norm", "sparse_embedding"))
        change |= {"optimizers": 1, "checkpointing": "none", "penalty": False, "data": "even"}
    if program.compiled != "none":
        rare = ("sparse_embedding", "complex", "weight_norm", "branch", "mixed")
        blocks = tuple(block for block in blocks if block not in rare)
        change |= {"checkpointing": "none", "penalty": False}
    if program.penalty:
        blocks = tuple(block for block in blocks if block != "sparse_embedding")
        change |= {"checkpointing": "none"}
    if program.checkpointing != "none":  # a branch would go another way when it is computed again
        blocks = tuple(block for block in blocks if block != "branch")
    if program.checkpointing == "reentrant":  # torch's own rules
        blocks = tuple(block for block in blocks if block not in ("frozen", "thawed", "unused", "branch"))
    if all(block in ("frozen", "thawed", "unused", "empty", "branch") for block in blocks):
        blocks = ("linear", *blocks)
    return dataclasses.replace(program, blocks=blocks, **change)  # type: ignore[arg-type]


def _loop(program: Program) -> Program:
    change: dict[str, object] = {}
    if program.optimizer in ("lbfgs", "two_passes"):
        change |= {
            "closure": True, "optimizers": 1, "scaler": "none", "passes": 1, "pair": False,
            "clip": "plan" if program.clip == "plan" else "none",
        }  # fmt: skip
    closure = change.get("closure", program.closure)
    if closure:
        change |= {"scaler": "none", "passes": 1, "optimizers": 1, "pair": False}
        if program.clip == "loop":
            change["clip"] = "none"
    if program.pair:
        change |= {"passes": 1, "scaler": "none", "closure": False}
        if program.optimizer in ("lbfgs", "two_passes"):
            change |= {"optimizer": "sgd", "closure": False}
    if change.get("passes", program.passes) == 1:
        change["accumulate"] = False
    return dataclasses.replace(program, **change)  # type: ignore[arg-type]


def _torch(program: Program) -> Program:
    """Take out what torch itself refuses, or gets wrong in one process."""
    change: dict[str, object] = {}
    if "sparse_embedding" in program.blocks:
        change |= {"clip": "none", "scaler": "none", "optimizers": 1, "zero": "none"}
        if program.optimizer in ("momentum", "adamw", "fused", "lbfgs"):
            change |= {"optimizer": "sgd"}
        if program.disturbance in ("grad_times_one", "keep_grads", "hand_written", "grad_data"):
            change |= {"disturbance": "none"}
    if program.optimizer == "lbfgs" and "complex" in program.blocks:
        change |= {"optimizer": "sgd"}
    if program.optimizer == "fused" and ("thawed" in program.blocks or program.disturbance == "channels_last"):
        change |= {"optimizer": "momentum"}  # torch's own limits: velocities that are missing, or lie otherwise
    if "complex" in program.blocks and program.optimizer == "fused":
        change |= {"optimizer": "sgd"}
    if program.optimizer == "lbfgs":  # torch's own limits: views of gradients, one group
        if "transposed" in program.blocks:
            change |= {"optimizer": "sgd"}
        if program.disturbance in ("channels_last", "late_parameter"):
            change |= {"disturbance": "none"}
    if program.clip != "none" and program.disturbance == "keep_grads":
        change |= {"disturbance": "none"}  # what is kept is clipped in place
    if program.scaler != "none" and program.disturbance in ("keep_grads", "assign"):
        change |= {"disturbance": "none"}  # it unscales in place what is kept, and needs gradients to look at
    return dataclasses.replace(program, **change)  # type: ignore[arg-type]


def _data(program: Program) -> Program:
    change: dict[str, object] = {}
    if program.data != "even":  # one epoch after the other, its last batch short
        change |= {"passes": 1, "accumulate": False, "blocks": tuple(b for b in program.blocks if b != "branch")}
        if program.disturbance == "throw_away":
            change["disturbance"] = "none"
    if not change.get("blocks", program.blocks):
        change["blocks"] = ("linear",)
    if program.disturbance == "throw_away" and program.accumulate and program.zero == "zeros":
        change["disturbance"] = "none"  # nobody sees that zeros are no gradients: see docs/check/right.md
    return dataclasses.replace(program, **change)  # type: ignore[arg-type]


def _precision(program: Program) -> Program:
    change: dict[str, object] = {}
    blocks = program.blocks
    if program.is_lossy:
        # What a codec loses is only in its residual if nothing else bends the gradient.
        grows = program.scaler == "growing" and program.codec != "auto"
        change |= {
            "optimizer": "sgd", "closure": False, "clip": "none", "dtype": "float32", "width": 64, "pair": False,
            "scaler": "growing" if grows else "none",
            "disturbance": "none" if program.disturbance in REFUSABLE else program.disturbance,
        }  # fmt: skip
        blocks = ("linear", *(block for block in blocks if block != "frozen"))
    if program.scaler != "none":
        change |= {"dtype": "float32"}
        blocks = tuple(block for block in blocks if block != "complex") or ("linear",)
    if change.get("dtype", program.dtype) == "float64" and program.disturbance == "double_float":
        change["disturbance"] = "none"  # float64 has nothing wider to go to and come back from
    if program.codec == "auto" and program.data != "even":
        change["data"] = "uneven"
    return dataclasses.replace(program, blocks=blocks, **change)  # type: ignore[arg-type]
