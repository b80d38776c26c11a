"""The optimizers of rows: what a server does to the rows that a push has gradients of, and to no other.

>>> RowOptimizer.parse("adagrad:lr=0.1")
RowOptimizer(name='adagrad', lr=0.1, eps=1e-10, beta1=0.9, beta2=0.999, weight_decay=0.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.suggestions import did_you_mean

_KEYS: Final = {
    "sgd": ("lr", "weight_decay"),
    "adagrad": ("lr", "eps", "weight_decay"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay"),
}
_DEFAULT_LR: Final = {"sgd": 0.01, "adagrad": 0.01, "adam": 0.001}
_DEFAULT_EPS: Final = {"sgd": 0.0, "adagrad": 1e-10, "adam": 1e-8}


@dataclass(frozen=True)
class RowOptimizer:
    """A rule and its numbers.

    ``sgd``; ``adagrad``: row-wise, one number a row, the sum of the mean squares of its gradients (TorchRec's
    ``EXACT_ROWWISE_ADAGRAD``); ``adam``: lazy, each row counts its own steps (Kingma and Ba 2015, with the
    corrections of the row's step). `weight_decay` is added to gradients (L2), so it reaches touched rows alone.
    """

    name: str
    lr: float
    eps: float
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    @classmethod
    def parse(cls, text: str) -> RowOptimizer:
        """Read such as ``adam:lr=0.01,beta2=0.99``. Raises `ConfigError` with what is expected."""
        name, _, rest = text.partition(":")
        if name not in _KEYS:
            raise ConfigError(
                f"optimizer of rows {text!r}: expected one of {', '.join(_KEYS)}", remedy=did_you_mean(name, _KEYS)
            )
        made = cls(name, _DEFAULT_LR[name], _DEFAULT_EPS[name])
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key.strip() not in _KEYS[name]:
                raise ConfigError(
                    f"optimizer of rows {text!r}: {name} has no {key.strip()!r}",
                    remedy=did_you_mean(key.strip(), _KEYS[name]),
                )
            try:
                number: Any = float(value)
            except ValueError:
                raise ConfigError(f"optimizer of rows {text!r}: {key} = {value!r}, expected a number") from None
            made = replace(made, **{key.strip(): number})
        made._refuse_wrong_numbers(text)
        return made

    def _refuse_wrong_numbers(self, text: str) -> None:
        for each in fields(self)[1:]:
            value, most = getattr(self, each.name), 1.0 if each.name.startswith("beta") else math.inf
            if not 0 <= value < most:
                expected = "a number from 0 and below 1" if most == 1 else "a finite number from 0"
                raise ConfigError(f"optimizer of rows {text!r}: {each.name} = {value}, expected {expected}")

    def state_width(self, dim: int) -> int:
        """Return how many numbers a row has beside its values."""
        return {"sgd": 0, "adagrad": 1, "adam": 2 * dim + 1}[self.name]

    def update(self, rows: torch.Tensor, states: torch.Tensor, grads: torch.Tensor, lr: float) -> None:
        """Make one step of `rows`, (u, dim), with `states`, (u, `state_width`), in place."""
        if self.weight_decay:
            grads = grads + self.weight_decay * rows
        if self.name == "sgd":
            rows.sub_(grads, alpha=lr)
        elif self.name == "adagrad":
            states += grads.square().mean(1, keepdim=True)
            rows.sub_(grads / (states.sqrt() + self.eps), alpha=lr)
        else:
            dim = rows.shape[1]
            first, second, steps = states[:, :dim], states[:, dim : 2 * dim], states[:, 2 * dim :]
            steps += 1
            first.lerp_(grads, 1 - self.beta1)
            second.mul_(self.beta2).addcmul_(grads, grads, value=1 - self.beta2)
            size = lr / (1 - self.beta1**steps)
            rows.sub_(size * first / ((second / (1 - self.beta2**steps)).sqrt() + self.eps))
