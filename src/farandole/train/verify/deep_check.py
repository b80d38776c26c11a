"""``farandole verify --deep``: gradients against a reference of one process. See [Note: the oracle] in `replay`.

For each exchange of gradients in the steps that are watched: every rank runs its passes again on copies of the
model, and the weighted sum is compared with what is in ``parameter.grad``. In the first of them rank 0 also runs
the joined batch in one pass, which finds what couples the samples of a batch (BatchNorm). Gradients that were
kept from an earlier pass are looked at again after the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.codec_spec import AUTO
from ...core.vocabulary.text import name_ranks
from ...parallel.data.batch_norm import is_synchronised, local_layers
from ...parallel.instrument.phase_hooks import observe_passes
from ...parallel.model import DistributedModel
from .joined import REMEDY, count_means, goes_with, joined_gradients, replaced
from .replay import Gradients, RecordedPass
from .verify import Check

_NAME = "gradients of one process"


@dataclass
class _Window:
    """What led to the next exchange of one model's gradients."""

    passes: list[RecordedPass] = field(default_factory=list)
    before: Gradients = field(default_factory=dict)
    """The gradients that were there when it began."""
    is_open: bool = False
    weighed: int = 0
    """Passes whose weight is known: the loop may give it between a forward pass and its backward pass."""
    exchanges: int = 0
    problem: str = ""
    tokens: list[float] = field(default_factory=list)
    """Elements that each mean of a loss was taken over."""


@dataclass
class _KeptGradient:
    """A gradient that was kept from an earlier exchange: the tensor, and what was in it."""

    name: str
    tensor: torch.Tensor
    was: torch.Tensor | None = None
    """Noted when the next backward pass begins: until then the loop may clip and unscale in place."""


class DeepCheck:
    """Compares the exchanges of all distributed models, from `start` to `stop`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._windows: weakref.WeakKeyDictionary[nn.Module, _Window] = weakref.WeakKeyDictionary()
        self._depth = 0
        self._undo: list[Any] = []
        self._kept: list[_KeptGradient] = []
        self._compared = 0
        self._worst: tuple[float, str] = (0.0, "")
        self._failed: list[str] = []
        self._not_compared = ""
        self._exchanged_before: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """How many exchanges each model had when this began to watch."""
        self._recorded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models of which an exchange followed a pass that was recorded."""
        self._notes: dict[str, Check] = {}

    # -- what it sees ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch: forward passes, and every call of ``torch.autograd.backward``."""
        for model in DistributedModel.all():
            self._exchanged_before[model] = _exchanges_of(model)
        self._undo = [
            observe_passes(self._world, self),
            replaced(torch.autograd, "backward", self._watched_backward),
            *count_means(self._counted),
        ]

    def stop(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """A pass of a distributed model begins."""
        window = self._window(model)
        if window is None or self._depth:
            return
        try:
            recorded = RecordedPass(model, arguments, named, self._world.session.batch_weight.factor)
        except Exception as problem:
            window.problem = f"the model or its inputs cannot be copied ({type(problem).__name__}: {problem})"
            return
        window.passes.append(recorded)

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """The pass is over."""
        window = self._windows.get(model)
        if window is not None and window.passes and not self._depth:
            window.passes[-1].watch_outputs(output)

    def _window(self, model: nn.Module) -> _Window | None:
        distributed = DistributedModel.of(model)
        if distributed.sharded is not None:
            self._not_compared = "parameters are sharded at zero = 3; verify with --set zero=0"
        if distributed.reducer is None:
            return None
        return self._windows.setdefault(model, _Window())

    def _counted(self, count: float) -> None:
        for window in self._windows.values():
            window.tokens.append(count)

    def _watched_backward(self, original: Any, *arguments: Any, **named: Any) -> None:
        self._depth += 1
        try:
            if self._depth == 1:
                self._open_windows()
            original(*arguments, **named)
        finally:
            self._depth -= 1
        if not self._depth:
            self._compare_all()

    def _open_windows(self) -> None:
        share = self._world.session.batch_weight
        for model, window in self._windows.items():
            for each in window.passes[window.weighed :]:
                each.factor = share.at_backward(each.factor)
            window.weighed = len(window.passes)
            reducer = DistributedModel.of(model).reducer
            if reducer is None or window.is_open:
                continue
            window.is_open, window.exchanges = True, reducer.exchanges_done
            for kept in self._kept:
                kept.was = kept.tensor.detach().clone() if kept.was is None else kept.was
            window.before = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}

    # -- what it compares --------------------------------------------------------------------

    def _compare_all(self) -> None:
        for model in DistributedModel.all():
            window, reducer = self._windows.get(model), DistributedModel.of(model).reducer
            if window is None or reducer is None or reducer.exchanges_done == window.exchanges:
                continue
            self._recorded.add(model)
            self._look_at_kept(window)
            if not self._failed:
                self._compare(model, window)
            del self._windows[model]
            self._keep(model)

    @torch.no_grad()
    def _compare(self, model: nn.Module, window: _Window) -> None:
        here = self._world
        passes = [each for each in window.passes if each.output_gradients]
        problem = window.problem or _incomparable(model)
        own: Gradients = {}
        token_weight = 0.0
        together = any(is_synchronised(module) for module in model.modules())
        if not problem and not together:
            try:
                own = weighted(passes, here.size)
                token_weight = sum(window.tokens) if len(window.tokens) == len(passes) == 1 else 0.0
            except Exception as failure:
                problem = f"the pass cannot be run again ({type(failure).__name__}: {failure})"
        gathered = all_gather_json(
            here, "verify/replayed", [problem, token_weight, [each.samples for each in passes]]
        )
        problems = [each[0] for each in gathered if each[0]]
        if problems:
            self._not_compared = problems[0]
            return
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        actual = {name: change(p, window.before.get(name)) for name, p in parameters.items()}
        if together:  # a pass of one rank alone is another thing
            self._judge_joined(model, passes, actual)
            return
        reference = summed(here, parameters, own)
        self._judge(model, actual, reference, own)
        self._look_at_tokens(parameters, passes, own, reference, [float(each[1]) for each in gathered])
        if self._compared == 1:
            self._look_at_joined(model, passes, actual)

    def _judge_joined(self, model: nn.Module, passes: list[RecordedPass], actual: Gradients) -> None:
        joined, why = joined_gradients(self._world, passes)
        why = all_gather_json(self._world, "verify/joined", why)[0]
        if why:
            self._not_compared = f"{why}, and the ranks' passes belong together (sync_batch_norm)"
        else:
            self._judge(model, actual, joined or {}, {})

    def _judge(self, model: nn.Module, actual: Gradients, reference: Gradients, own: Gradients) -> None:
        here = self._world
        differences = compare_gradients(actual, reference, own, here.size)
        self._compared += 1
        worst = max(differences, key=lambda each: each.error, default=Difference("", 0.0, ""))
        wrong = [each for each in differences if not each.error <= tolerance(model.get_parameter(each.name))]
        found = [] if not wrong else [worst.name, worst.error, worst.cause, len(wrong)]
        gathered = all_gather_json(here, "verify/differences", found)
        self._worst = max(self._worst, (worst.error, worst.name))
        ranks = [rank for rank, each in enumerate(gathered) if each]
        if ranks:
            name, error, cause, count = gathered[ranks[0]]
            more = f" (and {count - 1} more)" if count > 1 else ""
            self._failed.append(
                f"{name!r}{more} on {name_ranks(ranks)} in step {here.session.steps.done + 1}: "
                f"off by {error:.2g} of the reference{cause}"
            )

    def _look_at_tokens(
        self,
        parameters: Mapping[str, nn.Parameter],
        passes: list[RecordedPass],
        own: Gradients,
        reference: Gradients,
        counts: list[float],
    ) -> None:
        """See whether a loss is a mean over tokens, of which ranks had different numbers."""
        here = self._world
        if min(counts) <= 0 or "loss" in self._notes:
            return
        factor = passes[0].factor if passes else 0.0
        factors = [float(each) for each in all_gather_json(here, "verify/factors", factor)]
        if goes_with(counts, factors):
            return
        scale = counts[here.rank] * here.size / sum(counts) / factor
        by_tokens = summed(here, parameters, {name: gradient * scale for name, gradient in own.items()})
        error = relative(reference, by_tokens)
        self._notes["loss"] = Check(
            "mean of the loss",
            None,
            f"is over {', '.join(f'{count:g}' for count in counts)} elements on ranks 0 to {here.size - 1}, "
            f"and ranks are averaged by samples: the gradient is off by {error:.2g} of that of one mean over all",
            REMEDY,
            word="not exact",
        )

    def _look_at_joined(self, model: nn.Module, passes: list[RecordedPass], actual: Gradients) -> None:
        joined, problem = joined_gradients(self._world, passes)
        error = None if joined is None else relative(actual, joined)
        (error, problem), *_ = all_gather_json(self._world, "verify/joined", [error, problem])
        name = "joined batch"
        if error is None:
            self._notes[name] = Check(name, None, problem)
        elif error <= max(tolerance(parameter) for parameter in model.parameters()):
            self._notes[name] = Check(
                name, True, f"one pass over all ranks' samples has the same gradient ({error:.1g})"
            )
        else:
            layers = local_layers(model)
            cause = f": {len(layers)} BatchNorm layers normalise per rank" if layers else ""
            remedy = "--set sync_batch_norm=true" if layers else "the model mixes the samples of a batch"
            answer = f"one pass over all ranks' samples has another gradient, by {error:.2g} of it{cause}"
            self._notes[name] = Check(name, None, answer, remedy, word="not exact")

    # -- gradients that were kept ---------------------------------------------------------------

    def _keep(self, model: nn.Module) -> None:
        if self._kept or self._compared > 2:
            return
        named = [
            (name, p.grad) for name, p in model.named_parameters() if p.grad is not None and not p.grad.is_sparse
        ]
        self._kept = [_KeptGradient(name, grad) for name, grad in named[:2]]

    def _look_at_kept(self, window: _Window) -> None:
        """What the loop cleared and other code still holds must be what it was."""
        for kept in self._kept:
            if kept.name in window.before:
                continue  # it was not cleared: the loop adds to it, or filled it with zeros
            if kept.was is not None and not torch.equal(kept.tensor, kept.was):
                self._notes["kept"] = Check(
                    "kept gradients",
                    False,
                    f"{kept.name!r} of one pass was overwritten by the next, though it had been cleared",
                    "clone a gradient that is to be kept",
                )
                break
        self._kept = []

    # -- what it answers -----------------------------------------------------------------------

    def checks(self) -> list[Check]:
        """Return what was found; to be called by all ranks."""
        kept = all_gather_json(self._world, "verify/kept", "kept" in self._notes)
        if any(kept) and "kept" not in self._notes:
            answer = f"overwritten by the next pass on {name_ranks([r for r, found in enumerate(kept) if found])}"
            self._notes["kept"] = Check("kept gradients", False, answer, "clone a gradient that is to be kept")
        found, missing = self._gradients(), self._why_not_compared()
        partly = [Check(_NAME, None, f"not of every exchange: {missing}")] if missing and self._compared else []
        return [found, *partly, *self._notes.values()]

    def _why_not_compared(self) -> str:
        """Return what kept exchanges from being compared; empty: all were."""
        if self._not_compared:
            return self._not_compared
        models = DistributedModel.all()
        exchanged = [each for each in models if _exchanges_of(each) > self._exchanged_before.get(each, 0)]
        unseen = dict.fromkeys(type(model).__name__ for model in exchanged if model not in self._recorded)
        if unseen:
            return (
                f"no call of {' and '.join(unseen)} itself was seen with gradients, and passes through methods or "
                "parts of a model are not recorded"
            )
        if not models:
            return "no model was given to fd.distribute"
        return "" if self._compared else "no exchange of gradients was seen"

    def _gradients(self) -> Check:
        if self._failed:
            return Check(_NAME, False, self._failed[0], "please report it, with this page and the plan")
        if not self._compared:
            return Check(_NAME, None, self._why_not_compared())
        error, name = self._worst
        worst = f", the worst by {error:.1g} ({name!r})" if error else ""
        times = f"{self._compared} exchange{'s' * (self._compared > 1)}"
        return Check(_NAME, True, f"the same in {times}{worst}")


def _exchanges_of(model: nn.Module) -> int:
    reducer = DistributedModel.of(model).reducer
    return 0 if reducer is None else reducer.exchanges_done


def _incomparable(model: nn.Module) -> str:
    plan = DistributedModel.of(model).plan
    lossy = {} if plan is None else plan.lossy_keys()
    if plan is not None and plan.codec == AUTO and plan.lossy:
        lossy["codec"] = AUTO
    # Rounded parameters are those of the model at stages 1 and 2, and of the process that is compared with.
    lossy.pop("weight_codec", None)
    for name in lossy:
        return f"{name.replace('_', ' ')} {lossy[name]} sends approximations; verify with --set {name}=none"
    if any(parameter.is_complex() for parameter in model.parameters()):
        return "the model has complex parameters"
    return ""


# How far gradients are from their reference, and what that looks like. See [Note: the oracle] in `replay`.


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Difference:
    """How far one gradient is from its reference."""

    name: str
    error: float
    """Relative to the reference."""
    cause: str


def compare_gradients(actual: Gradients, reference: Gradients, own: Gradients, size: int) -> list[Difference]:
    """Return how far each gradient is from its reference, with the likely cause."""
    total = sum(g.numel() for g in reference.values())
    typical = (sum(float(g.square().sum()) for g in reference.values()) / max(total, 1)) ** 0.5
    found = []
    for name, expected in reference.items():
        given = actual[name].double()
        # Where the true gradient is rounding noise (a bias before BatchNorm), the others' size counts.
        scale = float(expected.norm()) + 1e-2 * typical * expected.numel() ** 0.5
        difference = float((given - expected).norm())
        error = difference / scale if scale else difference
        found.append(Difference(name, error, _likely_cause(given, expected, own.get(name), size)))
    return found


def _likely_cause(given: torch.Tensor, expected: torch.Tensor, own: torch.Tensor | None, size: int) -> str:
    norm = float(expected.norm())
    if not norm:
        return ""
    if not float(given.norm()):
        return ": it is zero"
    if own is not None and float((given - own.double() * size).norm()) < 1e-3 * norm:
        return ": it is this rank's own gradient, which never met the others'"
    ratio = float((given * expected).sum()) / norm**2
    if float((given - ratio * expected).norm()) < 1e-3 * norm:
        hint = " (added up, and not divided)" if abs(ratio - size) < 1e-3 else ""
        return f": it is {ratio:.4g} times that{hint}"
    return ""


def weighted(passes: Sequence[RecordedPass], size: int) -> Gradients:
    """Return this rank's part of the mean over ranks."""
    total: Gradients = {}
    for each in passes:
        if not each.factor:
            continue  # a placeholder
        with torch.enable_grad():
            replayed = each.replay()
        for name, gradient in replayed.items():
            part = _dense(gradient).double() * (each.factor / size)
            total[name] = part if name not in total else total[name] + part
    return total


def summed(here: World, parameters: Mapping[str, nn.Parameter], own: Gradients) -> Gradients:
    """Return the sum of `own` over all ranks, in float64 and by a plain all-reduce; zeros where none has one."""
    sums = {}
    for name, parameter in parameters.items():
        mine = own.get(name)
        part = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device) if mine is None else mine
        part = part.contiguous().clone()
        with translated(here, "gradients of one process"):
            dist.all_reduce(part, group=here.group)
        sums[name] = part
    return sums


def change(parameter: nn.Parameter, before: torch.Tensor | None) -> torch.Tensor:
    """Return what was added to a parameter's gradient."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    now = _dense(parameter.grad)
    return now if before is None else now.double() - _dense(before).double()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return it whole: at zero = 1 and 2 a rank has its rows, and all ranks ask for the same one."""
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def relative(actual: Gradients, reference: Gradients) -> float:
    """Return how far all gradients together are from their reference, as a part of it."""
    norm = sum(float(g.double().square().sum()) for g in reference.values()) ** 0.5
    apart = sum(float((actual[name].double() - g).square().sum()) for name, g in reference.items()) ** 0.5
    return float(apart / norm) if norm else float(apart)


def tolerance(parameter: torch.Tensor) -> float:
    """Return the largest error that rounding explains."""
    return _TOLERANCE.get(parameter.dtype, 1e-3)
