"""The passes of a model whose parameters are sharded: how FSDP2's gradients become the mean over all samples.

`ShardedModel` stands where the reducer stands in plain data parallel, and answers the same questions to the
optimizer's hooks. FSDP2 gathers parameters and reduces gradients; what is added here:

[Note: weights before the sum] A gradient is scaled by this rank's share of the samples when its unit's backward
pass ends, before FSDP2 adds it to the other ranks'. So passes of unequal batches may be accumulated.

[Note: passes that are held] With the plan's ``accumulate`` every pass is reduced, and FSDP2 adds it to the shard's
gradient: bytes for memory. Inside `fd.accumulate` FSDP2 does not reduce, and a unit's gradients stay whole on this
rank: memory for bytes. Each parameter's shard has a gradient meanwhile: the sum so far, or -0.0 if that is zero.
If it is gone at the next pass, the loop has cleared gradients (``zero_grad``): what was held is dropped as well.

[Note: unused parameters] FSDP2 reduces zeros for a parameter that had no gradient on this rank. At the end of a
pass the ranks add up who used what; a parameter that no rank used has no gradient, as in one process. The same
small message carries the changing buffers and the number of passes.

[Note: the end of a pass] FSDP2 queues its last callback when the first gradient reaches the model's output. Ours
is queued later, by the first unit that is done, so it runs when all gradients are reduced.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...comm.codecs.saved_state import Entry
from ...comm.device.streams import outside_graphs, untraced
from ...comm.engine.grad_ownership import drop_grads
from ...comm.engine.guards import CountCalls
from ...comm.engine.parameters import refuse_second_order
from ...comm.engine.row_exchange import require_shapes
from ...comm.world.comm_errors import translated
from ...comm.world.world import World
from ...core.link import ring_sent_bytes
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.errors import CommError, ConfigError, Mismatch
from ...core.vocabulary.events import BACKWARD, Phase
from ...core.vocabulary.spec import Plan
from ..changed_class import ChangedClass, change_class, make_kin
from ..data.batch_norm import BufferSync
from ..lower_precision import OF_ATTENTION, product_weights
from .comm_coded import CodedReduceScatter
from .exchange_records import BLOCKS_ALIKE, ExchangeRecords, unit_calls
from .unit import Unit, units_of

_OPERATION = "gradients of a sharded model"


class ShardedModel:
    """The passes of one model after `shard_parameters`."""

    def __init__(self, here: World, model: nn.Module, plan: Plan, buffers: BufferSync | None) -> None:
        """Begin: the units of `model` have their exchanges already."""
        self.world, self.plan = here, plan
        self.before_forward: Callable[[], None] | None = None
        """Called when a forward pass with gradients begins; raises what is wrong with the model."""
        self._after_exchange: Callable[[], None] = lambda: None
        self.accumulate = plan.accumulate
        self.exchanges_done = 0
        self.passes_held = 0
        """Backward passes since the last exchange that all ranks have agreed on."""
        self.share_of_batch = 1.0
        """This rank's share of the samples in the last backward pass, over the mean share."""
        self._model = weakref.ref(model)
        self._buffers = buffers
        self._state: Any = model._get_fsdp_state()  # type: ignore[operator]
        self._pass: _Pass | None = None
        self._counts = _CountsInUse(here)
        root: Any = model
        root.set_reduce_scatter_unused_params(True)
        self._state._lazy_init()  # before any part of the model runs by itself
        self.units = units_of(self._state)
        if plan.precision == "bf16" and not plan.bf16_parameters and plan.weight_codec == NONE:
            gather_in_half(model, self.units)
        self._records = ExchangeRecords(here, plan)
        for unit in self.units:
            self._records.watch(unit.group, partial(self._purpose, unit))
            unit.group.post_backward = partial(self._unit_ends, unit)
            if unit.code is not None:
                unit.code.members = partial(getattr, unit, "trained")
        model.register_forward_hook(outside_graphs(self._forward_ends))

    # -- queries, as those of a reducer ------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the world that the model was sharded in is still there."""
        return not self.world.closed

    @property
    def _codes(self) -> list[CodedReduceScatter]:
        """How units' gradients travel, where they do not as they are."""
        return [unit.code for unit in self.units if unit.code is not None]

    @property
    def has_codecs(self) -> bool:
        """Whether codecs keep residuals."""
        return bool(self._codes)

    @property
    def follows_loss_scale(self) -> bool:
        """See `StepExchange`."""
        return self.has_codecs

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """Asked with codecs alone, whose residuals have no scale here: refused."""
        raise ConfigError(
            "zero = 3: a codec keeps residuals of gradients, and a GradScaler changes their scale",
            remedy='train in bfloat16 without a scaler, or use codec = "none"',
        )

    def stand_ins(self) -> list[torch.Tensor]:
        """Return the gathered parameters, which are the modules' while a pass runs."""
        return [each for unit in self.units for each in unit.gathered()]

    def call_after_exchange(self, call: Callable[[], None]) -> None:
        """Call `call` on all ranks after each exchange, when the gradients are the means."""
        self._after_exchange = call

    # -- what codecs keep --------------------------------------------------------------------------

    def exchange_state(self) -> dict[str, Entry]:
        """Return what codecs keep on this rank, by parameter."""
        return {name: entry for each in self._codes for name, entry in each.state().items()}

    def load_exchange_state(self, entries: dict[str, Entry]) -> None:
        """Replace what codecs keep. Raises `ConfigError` for what does not fit."""
        members = [
            (unit, {each._param_fqn: tuple(each._orig_size) for each in unit.members}) for unit in self.units
        ]
        require_shapes(entries, {name: shape for _, shapes in members for name, shape in shapes.items()})
        waiting = dict(entries)
        for unit, shapes in members:
            if unit.code is not None:
                unit.code.load_state(shapes, waiting)

    # -- a pass ------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Bring what the loop has changed since the last pass into FSDP2's state; called before it gathers."""
        if not self.is_open:
            raise ConfigError(
                "zero = 3: the world that this model was sharded in was shut down",
                remedy="save the model before farandole.shutdown, and make it anew afterwards",
            )
        model: Any = self._model()
        if self._state._state_ctx.iter_forward_root is not None or (
            self._pass is not None and torch._C._current_graph_task_id() == -1
        ):
            self._pass = None  # an exception ended it
            model.reset_iter_state()
            self._drop_held()
        for unit in self.units:
            unit.refuse_replaced()
        if not torch.is_grad_enabled():
            return
        if self.before_forward is not None:
            self.before_forward()
        for unit in self.units:
            unit.follow_requires_grad()
        if self.passes_held and any(unit.was_cleared() for unit in self.units):
            self._drop_held()

    def backward_begins(self) -> None:
        """Open the pass: the first gradient has reached the model's output."""
        self._open()

    def _open(self) -> _Pass:
        refuse_second_order(
            "zero = 3", "would read parameters that are gathered no more",
            remedy="leave the terms of the loss out that need them, or use zero = 2",
        )  # fmt: skip
        if self._pass is not None:
            return self._pass
        share = self.world.session.batch_weight
        factor = share.factor
        if share.watches or share.count_number:
            factor = share.pass_opens(torch._C._current_graph_task_id())
            self._counts.refuse_old(share.count_number)
        self.share_of_batch = factor
        reduces = not self.world.session.holds_passes
        is_last = reduces and self.passes_held + 1 >= self.accumulate
        if is_last:
            calls = CountCalls.of(self.world)
            if not self.exchanges_done:
                calls.first_exchange()
            if share.count_number:
                calls.exchange_begins()
                calls.hear_others()
        self._pass = _Pass(factor, time.monotonic(), reduces=reduces, is_last=is_last)
        return self._pass

    def _unit_ends(self, unit: Unit, *_: object) -> None:
        """End a unit's part of the backward pass, instead of FSDP2's own function."""
        current = self._open()
        if not current.is_queued:
            current.is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(outside_graphs(self._pass_ends))
        unit.weigh(current.factor)
        unit.group.reduce_grads = current.reduces
        unit.reduce()
        if not current.reduces:
            unit.hold()
        elif not current.is_last:
            unit.note_sum()

    def _purpose(self, unit: Unit) -> str:
        """Return what `unit` is about to exchange for. See [Note: blocks alike] in `exchange_records`."""
        text = f"for {unit.place} of step {self.exchanges_done + 1}"
        self._records.note(text)
        return text

    def _pass_ends(self) -> None:
        current, self._pass = self._pass, None
        assert current is not None, "a pass ends once"
        now = time.monotonic()
        self.world.session.recorder.record(Phase(BACKWARD, current.begin_seconds, now))
        if not current.is_last:
            self.passes_held += 1
            return
        self._settle(current.factor, self.passes_held + 1)

    @torch.no_grad()
    def _settle(self, factor: float, passes: int) -> None:
        """Agree with all ranks on what was used, and on buffers, after the gradients are reduced."""
        if self._buffers is not None and not self.exchanges_done and not self._buffers.prepare():
            self._buffers = None
        bad = any(each.had_nonfinite for each in self._codes)
        digest = self._records.take_digest()
        facts = torch.tensor([passes, passes**2, bad, digest, digest**2], dtype=torch.float64)
        used = torch.tensor([flag for unit in self.units for flag in unit.used], dtype=torch.float64)
        pieces = [facts, used]
        if self._buffers is not None:
            flat = self._buffers.pack(factor / self.world.size)
            pieces.append(flat.to("cpu", torch.float64))
        message = torch.cat(pieces).to(self.world.device)
        begin = time.monotonic()
        what = f"for the end of step {self.exchanges_done + 1}"
        # In the shards' own group, where it has all ranks, those who have run one unit less meet the others.
        group: Any = self.units[0].shards if self.units else self.world.group
        group = group if group.size() == self.world.size else self.world.group
        with translated(self.world, _OPERATION), unit_calls(group, what):
            dist.all_reduce(message, group=group)
        message = message.cpu()
        sent = ring_sent_bytes(message.nbytes, self.world.size)
        self._records.add(begin, begin, time.monotonic(), sent)
        if not self._are_equal(message[0], message[1]):
            raise Mismatch(
                f"ranks have accumulated different numbers of backward passes: {passes} on this one, "
                f"{float(message[0]) / self.world.size:g} on average",
                rank=self.world.job_rank,
                operation=_OPERATION,
                remedy="hold the same passes on all ranks",
            )
        if not self._are_equal(message[3], message[4]):
            raise Mismatch(
                f"in step {self.exchanges_done + 1} ranks have run other blocks than each other, of equal shapes: "
                "parameters were put together from shards of different ones",
                rank=self.world.job_rank,
                operation=_OPERATION,
                remedy=BLOCKS_ALIKE,
            )
        at = len(facts)
        for unit in self.units:
            unit.drop_unused(message[at : at + len(unit.used)].tolist())
            at += len(unit.used)
        if self._buffers is not None:
            flat.copy_(message[at:])
            self._buffers.unpack()
        self.passes_held = 0
        self.exchanges_done += 1
        for each in self._codes:
            each.settle(is_used=not message[2])
        if message[2]:
            self._handle_nonfinite(int(message[2]))
        self._after_exchange()

    def _are_equal(self, total: torch.Tensor, squares: torch.Tensor) -> bool:
        """Return whether a whole number was the same on all ranks, by the sums of it and of its square."""
        return int(total) ** 2 == int(squares) * self.world.size

    def _handle_nonfinite(self, ranks: int) -> None:
        """Do what the plan says about a coded gradient with NaN or infinity, of which all ranks know."""
        if self.plan.nonfinite == "propagate":
            return
        text = f"gradients or their sum hold NaN or infinity on {ranks} of {self.world.size} ranks"
        for unit in self.units:
            drop_grads([each.sharded_param for each in unit.members])
        if self.plan.nonfinite == "raise":
            raise CommError(
                text,
                rank=self.world.job_rank,
                operation="backward",
                remedy="lower the learning rate, or clip gradients",
            )
        if self.world.rank == 0:
            warnings.warn(f"farandole: step skipped: {text}", RuntimeWarning, stacklevel=2)

    def _forward_ends(self, model: Any, *_: object) -> None:
        """Forget what was gathered and not used. After an evaluation no backward pass frees the root unit."""
        if self._pass is None:
            for unit in self.units:
                unit.forget_gathered()
        if not torch.is_grad_enabled():
            model.reshard()
            for unit in self.units:
                unit.copies.clear()
        elif not self.exchanges_done and self.units:
            self._first_forward_ends()

    def _first_forward_ends(self) -> None:
        """Refuse a forward pass that changes parameters, and meet.

        In the first step a backward pass begins with a meeting elsewhere, where a rank that has run fewer blocks
        would wait for one that gathers its next.
        """
        changed = [name for unit in self.units for name in unit.changed_in_place()]
        if self.world.device.type == "cpu":
            shards, what = self.units[0].shards, f", which changes {changed}" if changed else ""
            with translated(self.world, _OPERATION), unit_calls(shards, f"for the end of forward of step 1{what}"):
                dist.barrier(group=shards)
        if changed:
            raise ConfigError(
                f"zero = 3: the forward pass changes {', '.join(map(repr, changed[:3]))} in place, and the shard, "
                "which the optimizer steps with, would not see it",
                remedy="change parameters outside of the forward pass, such as after the step, or use zero = 2",
            )

    def _drop_held(self) -> None:
        self.passes_held = 0
        for unit in self.units:
            unit.drop_held()

    # -- a step ------------------------------------------------------------------------------------

    def note_step(self) -> None:
        """An optimizer steps."""
        self._counts.steps_begun += 1

    def note_used(self) -> None:
        """Nothing: gradients are the parameters' own."""

    def exchange_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """Nothing: a gradient that the loop writes is that of this rank's shard."""

    @torch.no_grad()
    def flush(self, is_dropped: Callable[[], bool] = lambda: False) -> None:
        """Reduce what is held, where the loop steps after fewer than ``accumulate`` passes; all ranks call it."""
        self._pass = None
        if self.passes_held and any(unit.was_cleared() for unit in self.units):
            self._drop_held()
        if not self.passes_held:
            return
        if self.accumulate == 1:  # else they are reduced, and `fd.accumulate` is refused
            for unit in reversed(self.units):
                unit.reduce_now()
            self._state._comm_ctx.reduce_scatter_states.clear()
        self._settle(self.share_of_batch, self.passes_held)


class _Pass:
    """One backward pass."""

    def __init__(self, factor: float, begin_seconds: float, *, reduces: bool, is_last: bool) -> None:
        """`reduces`: whether gradients become shards; `is_last`: whether these are the mean then."""
        self.factor, self.begin_seconds = factor, begin_seconds
        self.reduces, self.is_last = reduces, is_last
        self.is_queued = False


class _CountsInUse:
    """Which count of `fd.weight` the passes go by. See [Note: weights by count] in `comm.batch_weight`."""

    def __init__(self, here: World) -> None:
        self._here = here
        self.steps_begun = 0
        self._counted = (0, 0)
        """The count that the last pass went by, and the steps made before its first pass."""

    def refuse_old(self, number: int) -> None:
        """Raise `ConfigError` when a count that was given for an earlier step is still in use."""
        if number != self._counted[0]:
            self._counted = number, self.steps_begun
        elif number and self._counted[1] != self.steps_begun:
            CountCalls.of(self._here).refuse_if_others_count()
            raise ConfigError(
                "fd.weight was called for an earlier step and not for this one",
                remedy="call fd.weight(count) for every batch, or fd.weight(None) to weigh by samples again",
            )


# Stage 3 with `precision = "bf16"`: weights of matrix products travel and are whole in 2 bytes an element.
#
# Autocast casts such a weight where it is used, and backward keeps the cast. With parameters gathered in float32
# those are a copy of the whole model in 16 bits on every rank, which FSDP2 does not free. So the shard is cast,
# and what is gathered is what the product would have cast: the same bits. (FSDP2's `MixedPrecisionPolicy` casts
# every parameter of a unit; here norms, biases and all that autocast leaves alone stay in float32.) Backward adds
# up the gradients of one pass in 16 bits, as at the cast that autocast keeps, and those of passes and ranks in
# float32.
#
# [Note: reads beside a product] A layer gives its weight in 16 bits to its own forward pass under autocast. Anyone
# else who reads ``layer.weight`` while it is gathered (a router in float32, code with autocast switched off) gets
# it in float32: gathered from the shards there and then, by all ranks, with its gradient in float32.


_HALF = torch.bfloat16


class _Computing(threading.local):
    depth = 0


_computing = _Computing()
"""How many layers with such weights are computing in this thread, one inside the other."""


class HalfWeights(ChangedClass):
    """The first base of a layer whose weights are gathered in 16 bits. See [Note: reads beside a product]."""

    _farandole_wide: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    """By the name of a weight, what gathers it in float32."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the layer's own forward pass, which may read the weights as they are."""
        if torch.compiler.is_compiling():
            return super().forward(*arguments, **named)
        _computing.depth += 1
        try:
            return super().forward(*arguments, **named)
        finally:
            _computing.depth -= 1


def _weight(name: str) -> property:
    def read(layer: HalfWeights) -> torch.Tensor | None:
        if name not in layer._parameters:
            raise AttributeError(f"{type(layer).__name__!r} object has no attribute {name!r}")
        value = layer._parameters[name]
        if value is None or value.dtype != _HALF or _computes_in_half(value.device.type):
            return value
        wide = layer._farandole_wide.get(name)
        return value if wide is None else wide(value)

    return property(read)


def _computes_in_half(device: str) -> bool:
    """Return whether a product is being computed under autocast; of a graph the latter is known alone."""
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != _HALF:
        return False
    return torch.compiler.is_compiling() or _computing.depth > 0


class HalfProduct(HalfWeights):
    """A linear layer or a convolution."""

    weight = _weight("weight")


class HalfAttention(HalfWeights):
    """torch's attention, which reads the weight of its last layer too."""

    in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight = map(_weight, OF_ATTENTION)


def gather_in_half(model: nn.Module, units: Sequence[Unit]) -> None:
    """Let the blocks of `model` gather in bfloat16 what autocast would cast; what is in no block stays as it is.

    The loop may use the latter between forward and backward, outside of autocast. To be called before anything is
    gathered.
    """
    users = product_weights(model)
    for unit in units:
        if unit.group.modules == (model,):
            continue
        for index, member in enumerate(unit.members):
            for module, name in users.get(member.sharded_param, ()):
                member.param_dtype = _HALF
                unit.halves.add(index)
                if not isinstance(module, HalfWeights):
                    base: Any = HalfAttention if name in OF_ATTENTION else HalfProduct
                    kind: Any = type(module)
                    change_class(module, make_kin(base, kind), 'plan: precision = "bf16"')
                    vars(module)["_farandole_wide"] = {}
                vars(module)["_farandole_wide"][name] = partial(_read_wide, unit, index)


@untraced
def _read_wide(unit: Unit, index: int, half: torch.Tensor) -> torch.Tensor:
    if half is not unit.members[index]._unsharded_param:
        return half  # another tensor stands for it, as with torch.func.functional_call
    wide = _FullRead.apply(half, unit, index) if torch.is_grad_enabled() else _gather_wide(unit, index)
    if unit.watches_reads and not wide.is_inference():
        unit.copies.append((index, wide, wide._version))
    return wide


@torch.no_grad()
def _gather_wide(unit: Unit, index: int) -> torch.Tensor:
    member = unit.members[index]
    with unit_calls(unit.shards, f"for a read of {member._param_fqn!r}"):
        whole: torch.Tensor = member.sharded_param.full_tensor()
    return whole


class _FullRead(torch.autograd.Function):
    """A parameter in float32, whose gradient does not become one of the 16-bit parameter."""

    @staticmethod
    def forward(context: Any, half: torch.Tensor, unit: Unit, index: int) -> torch.Tensor:
        context.unit, context.index = unit, index
        return _gather_wide(unit, index)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        reads, index = context.unit.reads, context.index
        reads[index] = gradient.clone() if index not in reads else reads[index].add_(gradient)
        return None, None, None
