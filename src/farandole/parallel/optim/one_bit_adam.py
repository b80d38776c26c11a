"""1-bit Adam: Adam whose momentum travels as signs, once its variance has settled.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
ICML 2021. Adam's variance is not linear in the gradient, so it does not survive a coarse codec; but it settles
early. For `warm_up_steps` steps this is Adam. Then the variance is frozen, and the rest is linear.

[Note: momentum as a gradient] With b = beta1 and all ranks at the same momentum m, the new one is the mean of
b m + (1 - b) g over the ranks' gradients g. Divided by 1 - b that is g + b / (1 - b) m: the gradient and
something that the reducer adds to it (`GradientReducer.add_extra_gradient`). A codec that is linear in its
scale, as the sign codec is, sends the one as well as the other, and its error feedback is that of the momentum. So
``parameter.grad`` ends as the new momentum divided by 1 - b.

[Note: no gradient in the warm-up] An entry whose variance is still 0 at the end of the warm-up (a word not seen)
would be divided by nearly nothing as soon as a sign arrives. It takes the mean of its tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch.optim import Optimizer
from torch.optim.adam import adam

from ...comm.codecs.registry import can_have, choose_codec
from ...comm.engine.guards import refuse_messages
from ...comm.engine.reducer import GradientReducer
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import ConfigError

CODEC = CodecSpec.parse("sign")


class OneBitAdam(Optimizer):
    """Adam for `warm_up_steps` steps; then Adam with a frozen variance, exchanging one bit per element.

    The update during warm-up is that of `torch.optim.Adam`, and so are the names of the state. After warm-up the
    momentum of float32 parameters with at least two dimensions and 4,096 elements is sent by the codec `sign`; the
    gradients of other parameters are exchanged as during warm-up.

    Args:
        params: parameters or parameter groups, as for `torch.optim.Adam`.
        lr: learning rate, at least 0.
        betas: decay of momentum and of variance, each in [0, 1).
        eps: added to the root of the variance, greater than 0.
        weight_decay: factor of the L2 penalty, at least 0.
        warm_up_steps: number of steps before the variance is frozen; a fifth to a quarter of the run.

    Raises:
        ConfigError: settings out of range, sparse gradients, or a step that a `GradScaler` makes.
    """

    _step_supports_amp_scaling = True
    """Not so, but then a scaler says in attributes that it makes the step."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warm_up_steps: int,
    ) -> None:
        """`warm_up_steps`: a fifth to a quarter of the run, and longer than the learning rate's own warm-up."""
        self._homes: dict[torch.Tensor, tuple[GradientReducer, str]] = {}
        self._travelling: set[torch.Tensor] = set()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warm_up_steps": warm_up_steps,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_homes", {})
        self.__dict__.setdefault("_travelling", set())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`. Raises `ConfigError` for settings out of range."""
        _refuse_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def attach(self, reducer: GradientReducer, parameters: Mapping[str, torch.Tensor]) -> None:
        """Use `reducer`, which keeps `parameters` equal; to be called by all ranks. `fd.distribute` does.

        Raises `PlanError` for parameters on an accelerator: momentum could not travel.
        """
        refuse_messages(
            reducer.world, list(parameters.items()), reducer.plan, codecs=[CODEC.to_text()], sessions=True
        )
        self._homes.update({parameter: (reducer, name) for name, parameter in parameters.items()})
        self._agree()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """See `torch.optim.Optimizer`. The last step of the warm-up switches codecs: all ranks must make it."""
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            raise ConfigError(
                "OneBitAdam: a GradScaler scales the gradients, but not the momentum that travels with them",
                remedy="train in bfloat16, which needs no scaler, or use torch.optim.Adam",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            warm = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if self._is_warm(parameter, group):
                    self._update(parameter, group)
                else:
                    warm.append(parameter)
            self._adam(warm, group)
        self._agree()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer`."""
        super().zero_grad(set_to_none)
        self._ask()  # a gradient that no step used had the momentum in it

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`. To be called by all ranks, once the model is distributed."""
        super().load_state_dict(state_dict)
        self._agree()

    # -- updates -------------------------------------------------------------------------------

    def _is_warm(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        state = self.state.get(parameter)
        return state is not None and "step" in state and int(state["step"]) >= group["warm_up_steps"]

    def _adam(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        for parameter in parameters:
            _refuse_sparse(parameter)
        states = [self._state_of(parameter) for parameter in parameters]
        adam(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for state in states:
            if int(state["step"]) == group["warm_up_steps"]:
                _fill_zeros(state["exp_avg_sq"])

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Make a step after the warm-up."""
        _refuse_sparse(parameter)
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None, "parameters without a gradient are left out"
        if group["weight_decay"]:
            grad = grad.add(parameter, alpha=group["weight_decay"])
        beta1, beta2 = group["betas"]
        momentum = state["exp_avg"]
        if self._has_momentum(parameter):
            torch.mul(grad, 1 - beta1, out=momentum)
        else:
            momentum.lerp_(grad, 1 - beta1)
        state["step"] += 1
        spread = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2 ** group["warm_up_steps"]))
        rate = group["lr"] / (1 - beta1 ** int(state["step"]))
        parameter.addcdiv_(momentum, spread.add_(group["eps"]), value=-rate)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    # -- what travels --------------------------------------------------------------------------

    def _has_momentum(self, parameter: torch.Tensor) -> bool:
        """Return whether the momentum is in the gradient already. See [Note: momentum as a gradient]."""
        if parameter not in self._travelling:
            return False
        reducer, name = self._homes[parameter]
        return not reducer.has_pending(name)

    def _agree(self) -> None:
        """Let the parameters that are warm travel as momentum, and the others as gradients."""
        changes: dict[GradientReducer, dict[str, CodecSpec]] = {}
        self._homes = {parameter: home for parameter, home in self._homes.items() if home[0].is_open}
        self._travelling &= self._homes.keys()
        for group in self.param_groups:
            for parameter in group["params"]:
                travels = parameter in self._travelling
                if parameter in self._homes and self._should_travel(parameter, group) != travels:
                    reducer, name = self._homes[parameter]
                    spec = choose_codec(name, parameter, reducer.plan) if travels else CODEC
                    changes.setdefault(reducer, {})[name] = spec
                    self._travelling ^= {parameter}
                    if travels:
                        reducer.add_extra_gradient(name, None)
        for reducer, codecs in changes.items():
            reducer.switch_codecs(codecs)
        self._ask()

    def _should_travel(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        return self._is_warm(parameter, group) and can_have(parameter, CODEC)

    def _ask(self) -> None:
        for group in self.param_groups:
            factor = group["betas"][0] / (1 - group["betas"][0])
            for parameter in group["params"]:
                if parameter in self._travelling:
                    reducer, name = self._homes[parameter]
                    reducer.add_extra_gradient(name, (self.state[parameter]["exp_avg"], factor))


def _fill_zeros(variance: torch.Tensor) -> None:
    """See [Note: no gradient in the warm-up]."""
    mean = float(variance.mean())
    variance.masked_fill_(variance == 0, mean if mean > 0 else 1.0)


def _refuse_sparse(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise ConfigError(
            f"OneBitAdam: the gradient of a parameter of shape {tuple(parameter.shape)} is sparse",
            remedy="make its embedding with sparse=False, or give it an optimizer of its own",
        )


def _refuse_settings(group: Mapping[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    wrong = [
        f"{name} = {value}, expected {expected}"
        for name, value, fits, expected in (
            ("lr", group["lr"], group["lr"] >= 0, "at least 0"),
            ("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers of at least 0 and below 1"),
            ("eps", group["eps"], group["eps"] >= 0, "at least 0"),
            ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0, "at least 0"),
            ("warm_up_steps", group["warm_up_steps"], group["warm_up_steps"] >= 1, "at least 1"),
        )
        if not fits
    ]
    if wrong:
        raise ConfigError(f"OneBitAdam: {wrong[0]}")
