"""What happens before an optimizer's step: gradients that did not travel yet do, and are clipped.

[Note: closures] A closure evaluates the model inside the step, once or many times. What happens before a plain
step then happens after each evaluation: what is held back is exchanged and gradients are clipped. The loss that
the closure returns becomes the mean over the ranks' samples, which is what one process would see: a line search
that looked at each rank's own would go different ways.

[Note: scaled gradients] An optimizer that unscales within its step (``fused=True``) gets gradients times the scale
of a `GradScaler`, and is told the scale in attributes. Others get theirs unscaled, each when it is its turn.

[Note: clipping inside the step] A fused optimizer divides each gradient by ``grad_scale`` as it reads it, and
writes it back. So where one such optimizer has all gradients, they are not multiplied in a pass of their own: the
scale that it is told bounds their norm too. The result is that of `clip_grad_norm_`, but for rounding.

[Note: one norm] The optimizers of one `distribute` call share one model, so ``clip_norm`` bounds the norm of all
their gradients together, once an exchange, when the first of them steps.

[Note: steps within steps] The hooks of an optimizer run around the `step` of every class that torch ever saw an
object of. So a subclass whose `step` calls ``super().step()`` runs them twice a step, once more inside,
but only in processes that also made an object of the base class. Code that counts steps, clips or measures
wants the outer one. A count of begun and ended steps would not do: a step that raises has no end.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, MethodType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ...comm.device.streams import outside_graphs
from ...comm.engine.grad_ownership import GradsAside, lie_as_parameters
from ...comm.world.comm_errors import translate_error
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import LOSS_SCALE, SKIPPED_STEPS, Logged
from ...core.vocabulary.text import write_notice
from ..data.model_changes import ModelGuard, OptimizerGuard
from ..loss_scaling import DynamicLossScale

# Steps of an optimizer that hooks alone do not tell: one within a step, and one that raises.

_AROUND = getattr(Optimizer.profile_hook_step(lambda: None), "__code__", None)
"""The code that torch runs around every `step`."""


def is_nested_step(optimizer: Optimizer) -> bool:
    """Return whether the hook of `optimizer` that calls this runs inside another step of `optimizer`."""
    inner = _around(sys._getframe(1), optimizer)
    return inner is not None and _around(inner.f_back, optimizer) is not None


def _around(frame: FrameType | None, optimizer: Optimizer) -> FrameType | None:
    while frame is not None:
        if frame.f_code is _AROUND and frame.f_locals.get("self") is optimizer:
            return frame
        frame = frame.f_back
    return None


def undo_after_errors(optimizer: Optimizer, undo: Callable[[Optimizer], None]) -> None:
    """Call `undo` when `optimizer.step` raises: no hook runs after it then."""
    inner = outside_graphs(optimizer.step)  # what undoes errors changes the groups during a step

    @functools.wraps(inner)
    def undoing(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except BaseException:
            undo(optimizer)
            raise

    # A method, as the one before it: schedulers of torch take it apart.
    optimizer.step = MethodType(undoing, optimizer)  # type: ignore[method-assign]


# A notice about float16 of the script's own, whose gradients nothing scales.


class PassDtype(Protocol):
    """What knows how the last forward pass with gradients ran: `ModelWatch`."""

    in_float16: bool


class ScalerWatch:
    """The step pre-hook that misses a `GradScaler` around steps after ``torch.autocast`` in float16."""

    def __init__(self, here: World, watch: PassDtype) -> None:
        self._here, self._watch = here, watch
        self._is_noticed = False

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Write one notice, on rank 0."""
        if (
            self._is_noticed
            or not self._watch.in_float16
            or is_nested_step(optimizer)
            or scaler_around() is not None
        ):
            return
        self._is_noticed = True
        if self._here.rank == 0:
            write_notice(
                "warning: the forward pass runs under autocast in float16 and no GradScaler scales the loss, so "
                'gradients below 6e-8 are lost; set precision = "fp16" in the plan, or use torch.amp.GradScaler'
            )


# A word at the end, when the plan key `accumulate` changed nothing: a loop that steps after each pass.
class AccumulateWord:
    """Counts the optimizer steps of a world whose plan accumulates."""

    def __init__(self, here: World) -> None:
        self._rank = here.rank
        self._accumulate = self._steps = self._after_one = 0
        here.session.call_on_close(self.say)

    def note(self, accumulate: int, held: int) -> None:
        """Note a step after `held` passes that were not exchanged yet, of `accumulate`."""
        self._accumulate = accumulate
        self._steps += 1
        self._after_one += held == 1

    def say(self) -> None:
        """Say on rank 0 that every step came after a single pass, if it did."""
        if self._rank == 0 and self._after_one == self._steps > 0:
            write_notice(
                f"plan: accumulate = {self._accumulate} had no effect: the optimizer stepped after each backward "
                "pass; let the loop step less often, or leave accumulate out"
            )


class StepExchange(Protocol):
    """What makes gradients the mean over the ranks, as an optimizer's step sees it: `GradientReducer`, for one."""

    @property
    def accumulate(self) -> int:
        """Backward passes whose gradients are added up before an exchange."""

    @property
    def is_open(self) -> bool:
        """Whether gradients are still exchanged."""

    @property
    def exchanges_done(self) -> int:
        """Exchanges so far."""

    @property
    def passes_held(self) -> int:
        """Backward passes whose gradients are to be exchanged with a later one's."""

    @property
    def share_of_batch(self) -> float:
        """This rank's share of the samples in the last backward pass, over the mean share."""

    @property
    def follows_loss_scale(self) -> bool:
        """Whether the scale of a `GradScaler` matters: to residuals of codecs, or to what is measured."""

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """Take the scale of gradients from `read`, which returns 0.0 for unknown."""

    def flush(self, is_dropped: Callable[[], bool] = ...) -> None:
        """Exchange what was not exchanged yet. `is_dropped`: whether the step will not use the gradients."""

    def exchange_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """Exchange gradients that no backward pass brought."""

    def note_used(self) -> None:
        """An optimizer steps with the gradients as they are."""

    def note_step(self) -> None:
        """An optimizer that uses these gradients steps."""


class Clipping:
    """Bounds the norm of all gradients of `optimizers`. See [Note: one norm]."""

    def __init__(
        self, norm: float, optimizers: Sequence[Optimizer], reducer: StepExchange | None, *, in_steps: bool = False
    ) -> None:
        """`in_steps`: whether fused steps may clip. See [Note: clipping inside the step]."""
        self._norm = norm
        self._in_steps = in_steps and len(optimizers) == 1
        self._optimizers = list(optimizers)
        self._reducer = reducer
        self._clipped_at = -1
        self._served: set[int] = set()  # ids of the optimizers that have stepped with what was clipped
        self._passes = 0
        self._scaled: Optimizer | None = None
        """The optimizer that was told a scale of ours."""
        counted = self._parameters() if reducer is None and len(self._optimizers) > 1 else []
        self.hooks = [
            each.register_post_accumulate_grad_hook(self._note_pass) for each in counted if each.requires_grad
        ]

    def clip(self, optimizer: Optimizer, *, evaluated: bool) -> None:
        """Clip before `optimizer` uses the gradients; `evaluated`: a closure has just made them."""
        done = self._passes if self._reducer is None else self._reducer.exchanges_done
        if not evaluated and done == self._clipped_at and id(optimizer) not in self._served:
            self._served.add(id(optimizer))
            return
        self.after(optimizer)
        self._clipped_at, self._served = done, {id(optimizer)}
        norm = self._norm
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found is not None and float(found) > 0:
            return  # the step does nothing
        if scale is not None:
            norm *= float(scale)
        elif len(self._optimizers) > 1:
            self._refuse_scaled()
        if self._in_steps and not evaluated and _is_fused(optimizer):
            self._tell_scale(optimizer, norm, scale)
        else:
            torch.nn.utils.clip_grad_norm_(self._parameters(), norm)

    def after(self, *_: Any) -> None:
        """Take the scale back that an optimizer was told for one step."""
        if self._scaled is not None and vars(self._scaled).pop("grad_scale", None) is not None:
            vars(self._scaled).pop("found_inf", None)
        self._scaled = None

    def _tell_scale(self, optimizer: Any, norm: float, scale: torch.Tensor | None) -> None:
        """See [Note: clipping inside the step]. `norm`: the bound, of gradients times `scale`."""
        gradients = [each.grad for each in self._parameters() if each.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        if total.dtype == torch.float64:  # the scale has 32 bits
            torch.nn.utils.clip_grads_with_norm_(self._parameters(), norm, total)
            return
        factor = torch.clamp(norm / (total + 1e-6), max=1.0).float()  # as `clip_grads_with_norm_` has it
        if scale is not None:
            optimizer.grad_scale = scale / factor
            return  # a GradScaler takes its scale back itself
        self._scaled = optimizer
        optimizer.grad_scale, optimizer.found_inf = factor.reciprocal(), torch.zeros_like(factor)

    def _parameters(self) -> list[torch.Tensor]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())

    def _note_pass(self, _: torch.Tensor) -> None:
        self._passes += 1

    def _refuse_scaled(self) -> None:
        """Refuse gradients of which only some are unscaled. See [Note: scaled gradients]."""
        scaler = scaler_around()
        if scaler is None:
            return
        stages = [scaler._per_optimizer_states[id(each)]["stage"].name for each in self._optimizers]
        if "READY" in stages:
            raise ConfigError(
                "plan: clip_norm bounds the norm of all optimizers' gradients, but the GradScaler has not "
                "unscaled all of them yet",
                remedy="call scaler.unscale_(optimizer) for each before the first scaler.step",
            )


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether a step of torch's own divides gradients by a scale, for all parameters alike."""
    is_torch = type(optimizer).__module__.startswith("torch.optim.")
    return is_torch and all(group.get("fused") for group in optimizer.param_groups)


class BeforeStep:
    """The step pre-hook of one optimizer of a distributed model."""

    def __init__(
        self,
        here: World,
        optimizer: Optimizer,
        reducer: StepExchange | None,
        *,
        clipping: Clipping | None,
        scale: DynamicLossScale | None,
        model: ModelGuard,
        models: Callable[[], Sequence[nn.Module]],
        policy: SyncPolicy | None = None,
    ) -> None:
        """`scale`: of the plan's float16 passes. `models`: all that are distributed."""
        self._policy = policy
        self._here, self._reducer, self._clipping, self._scale = here, reducer, clipping, scale
        self._aside: GradsAside | None = None
        self._model, self._models = model, models
        self._optimizer = OptimizerGuard(optimizer)
        self._exchanges_used = 0

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the gradients ready, or the closure make them so."""
        if is_nested_step(optimizer):
            return None
        _refuse_inside_backward()
        if self._here.session.holds_passes:
            raise ConfigError(
                "an optimizer steps inside fd.accumulate, where gradients are this rank's own",
                remedy="enter fd.accumulate for backward passes alone, and step after one outside of it",
            )
        if self._scale is not None and scaler_around() is not None:
            raise ConfigError(
                'plan: precision = "fp16" scales the gradients, and so does a GradScaler of the script',
                remedy="leave the GradScaler and autocast out of the script, or precision out of the plan",
            )
        self._model.check()
        self._optimizer.check(optimizer, self._models())
        if self._policy is not None:
            self._policy.step_begins(optimizer, is_scaled=scaler_around() is not None)
        wrapped = self._wrap(optimizer, args, kwargs)
        if wrapped is None:  # what is held goes with the backward pass of a closure
            self._flush(optimizer)
            self._make_ready(optimizer, evaluated=False)
        if self._policy is not None:
            self._policy.gradients_ready(optimizer, has_closure=wrapped is not None)
        if self._reducer is not None:
            self._reducer.note_step()
            if self._reducer.follows_loss_scale and (scaler := scaler_around()) is not None:
                self._reducer.follow_loss_scale(partial(_scale_of, weakref.ref(scaler)))
        return wrapped

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Give a step that was left out its gradients back, so that the loop sees them."""
        if self._aside is not None and not is_nested_step(optimizer):
            self._aside.restore()
            self._aside = None

    def meet(self, optimizer: Optimizer, *_: Any) -> None:
        """After a step: the policy's turn."""
        if self._policy is not None and not is_nested_step(optimizer):
            self._policy.step_ends(optimizer)

    def _flush(self, optimizer: Optimizer) -> None:
        if self._reducer is None or not self._reducer.is_open:
            return
        if self._reducer.accumulate > 1:
            word = self._here.session.keep(AccumulateWord, lambda: AccumulateWord(self._here))
            word.note(self._reducer.accumulate, self._reducer.passes_held)
        if self._reducer.passes_held and scaler_around() is not None:
            if self._reducer.accumulate == 1:
                raise ConfigError(
                    f"the optimizer steps after {self._reducer.passes_held} backward passes inside fd.accumulate "
                    "and none outside of it, and a GradScaler has looked at this rank's own gradients alone",
                    remedy="leave fd.accumulate for the last backward pass before scaler.step",
                )
            raise ConfigError(
                "plan: the optimizer steps after fewer backward passes than accumulate = "
                f"{self._reducer.accumulate}, and a GradScaler has looked at this rank's own gradients alone",
                remedy="leave out a last group of batches that is shorter, or set accumulate = 1",
            )
        scale = self._scale
        self._reducer.flush(lambda: scale is not None and scale.is_dropped(id(optimizer)))

    def _make_ready(self, optimizer: Optimizer, *, evaluated: bool) -> None:
        reducer = self._reducer
        if reducer is not None and reducer.is_open:
            if reducer.exchanges_done == self._exchanges_used:
                reducer.exchange_written([p for group in optimizer.param_groups for p in group["params"]])
            self._exchanges_used = reducer.exchanges_done
        if self._scale is not None and self._drops(self._scale, optimizer):
            self._aside = GradsAside([p for group in optimizer.param_groups for p in group["params"]])
            return  # an optimizer leaves out parameters without a gradient
        if self._clipping is not None:
            self._clipping.clip(optimizer, evaluated=evaluated)
        if reducer is not None:
            for group in optimizer.param_groups:
                if group.get("fused"):
                    lie_as_parameters(group["params"])
            reducer.note_used()

    def _drops(self, scale: DynamicLossScale, optimizer: Optimizer) -> bool:
        before = scale.state_dict()
        dropped = scale.step(id(optimizer))
        if scale.value != before["scale"] or scale.skipped_steps != before["skipped_steps"]:
            values = {LOSS_SCALE: scale.value, SKIPPED_STEPS: float(scale.skipped_steps)}
            self._here.session.recorder.record(Logged(metrics=values))
            if self._here.rank == 0 and scale.value < 1.0 <= float(before["scale"]):
                write_notice(
                    f"warning: {scale.skipped_steps} steps were skipped, and at a loss scale of 1 gradients are "
                    "still not finite: NaN or infinity is in the model or its data"
                )
        return dropped

    # -- closures; see [Note: closures] ------------------------------------------------------------

    def _wrap(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with a closure that does what is needed after it; None where there is none."""
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._closure(optimizer, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._closure(optimizer, args[1]), *args[2:]), kwargs
        return None

    def _closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._flush(optimizer)
            self._make_ready(optimizer, evaluated=True)
            return self._mean(loss)

        return evaluate

    def _mean(self, loss: Any) -> Any:
        here, reducer = self._here, self._reducer
        if reducer is None or not reducer.is_open or not _is_number(loss):
            return loss
        share = reducer.share_of_batch
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        mine = value * share / here.size if share else 0.0
        mean = torch.tensor(mine, dtype=torch.float64, device=here.device)
        try:
            dist.all_reduce(mean, group=here.group)
        except RuntimeError as problem:
            raise translate_error(problem, here, "mean of a closure's loss") from None
        if isinstance(loss, torch.Tensor):
            return mean.to(loss).reshape(loss.shape)
        return float(mean)


def _is_number(loss: Any) -> bool:
    if isinstance(loss, torch.Tensor):
        return loss.numel() == 1 and loss.is_floating_point()
    return isinstance(loss, (int, float)) and not isinstance(loss, bool)


def _scale_of(scaler: weakref.ref[GradScaler]) -> float:
    alive = scaler()
    return 0.0 if alive is None else float(alive.get_scale())


def scaler_around() -> GradScaler | None:
    """Return the `GradScaler` whose `step` called this, if one did and it scales."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            found: GradScaler = frame.f_locals["self"]
            return found if found.is_enabled() else None
        frame = frame.f_back
    return None


def _refuse_inside_backward() -> None:
    if torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            "an optimizer steps inside backward(), where the gradients of other ranks have not arrived yet",
            remedy="step after backward(), or give the loop no distributed optimizer",
        )


# What a model asks of a policy that lets its ranks train on their own: `sync.local_steps`, for one.


class SyncPolicy(Protocol):
    """When the replicas of one model agree, where not in every step."""

    @property
    def is_local(self) -> bool:
        """Whether ranks train on their own now."""

    @property
    def has_own_states(self) -> bool:
        """Whether optimizers have other states on each rank, right after `drain`."""

    def step_begins(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """An optimizer is about to step; `is_scaled`: by a `GradScaler`."""

    def gradients_ready(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The gradients of the step are as the optimizer will find them; `has_closure`: a closure makes them."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model have the averaged parameters."""

    def drain(self) -> None:
        """Meet now; to be called by all ranks."""

    def close(self) -> None:
        """Close the connections."""

    def note_state_dict(self) -> None:
        """A state dict of the model is taken."""

    def note_loaded(self) -> None:
        """The model was given other parameters."""

    def gather_states(self) -> None:
        """Right after `drain`: have the optimizers' states where they are saved from."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has beside model and optimizers, right after `drain`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; by all ranks, when model and optimizers are loaded."""


MakePolicy = Callable[..., SyncPolicy]
"""Makes the policy that a plan asks for; called by all ranks, with equal parameters.

Gets the ranks, the model, its optimizers and the plan; and by name: `buffers`, what travels with each meeting;
`end_every_step`, which stops the exchange of gradients; `tuner`, which returns what chooses the codec of that.
"""
