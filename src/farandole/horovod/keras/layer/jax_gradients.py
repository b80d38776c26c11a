"""The gradients of a Keras optimizer on JAX: a compiled step calls the engine, and waits for it.

JAX compiles the whole step. Inside it stands one call of a Python function on the host, which takes all gradients
and returns those of all ranks: as on torch, in flat buckets. Calls are ordered, so several in one program, or in
programs that run one after the other, come in the same order on all ranks.

[Note: in the call] The function runs on a thread of JAX while the step waits. It must not compute with JAX: that
would wait for the thread it is on. So it takes and returns arrays of NumPy alone, and knows variables by what
stands in for them: to read one of them may be to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import io_callback

from ....comm.named_ops.operations.signature import DTYPES
from ....core.environ.env import read_elastic_settings
from ...common.basics import basics
from ...exchange.failures import failures
from ...exchange.names import key_of
from ...exchange.settings import GradientSettings
from ...verify.verification import NOT_IN_LOOPS_ON_JAX, find_verification
from .torch_gradients import TorchGradients


class _OnHost(TorchGradients):
    """In a step of JAX: variables are stand-ins, which cannot be read. See [Note: in the call]."""

    front_end = "keras on jax"

    def _is_eager(self) -> bool:
        return False

    def _is_seen(self) -> bool:
        """Return whether ``farandole verify`` sees the steps by the loop of `fit`: it reads variables itself."""
        verification = find_verification(basics.running.world)
        return verification is not None and verification.fit is not None


@dataclass(frozen=True, eq=False)
class _StandIn:
    """A variable, as the exchange knows it. See [Note: in the call]."""

    path: str


class JaxGradients:
    """A `backends.KerasGradients`."""

    def __init__(self, settings: GradientSettings, name: str) -> None:
        self.settings = settings
        self.local: set[int] = set()
        self._stand_ins: dict[int, _StandIn] = {}
        groups = settings.groups
        if isinstance(groups, (list, tuple)):
            groups = [[self._stand_in(variable) for variable in group] for group in groups]
        self._host = _OnHost(replace(settings, groups=groups), name)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; None stays None."""
        running, process_set = basics.running, self.settings.process_set
        running.plan_is_applied = True
        verification = find_verification(running.world)
        if verification is not None and verification.fit is None:
            verification.not_checked = NOT_IN_LOOPS_ON_JAX
        results = list(gradients)
        alone = process_set.size() == 1 and read_elastic_settings() is None
        there = [place for place, gradient in enumerate(results) if gradient is not None]
        if not there or alone or not process_set.included():
            return results
        known = [self._stand_in(variable) for variable in variables]
        self._host.local.update(key_of(self._stand_ins[key]) for key in self.local if key in self._stand_ins)
        for place in there:
            if str(results[place].dtype) not in DTYPES:
                raise ValueError(f"{known[place].path}: Tensor type {results[place].dtype} is not supported.")

        def exchange(*arrays: Any) -> list[Any]:
            sent: list[torch.Tensor | None] = [None] * len(known)
            try:
                taken = [np.asarray(array) for array in arrays]
                for place, array in zip(there, taken, strict=True):
                    sent[place] = _to_torch(array)
                received = self._host(sent, known)
                return [_to_numpy(received[place], array) for place, array in zip(there, taken, strict=True)]
            except Exception as problem:
                failures.note(problem)
                raise

        shapes = [jax.ShapeDtypeStruct(results[place].shape, results[place].dtype) for place in there]
        found = io_callback(exchange, shapes, *(results[place] for place in there), ordered=True)
        for place, result in zip(there, found, strict=True):
            results[place] = result
        return results

    def _stand_in(self, variable: Any) -> _StandIn:
        return self._stand_ins.setdefault(key_of(variable), _StandIn(variable.path))


def _to_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a copy, as what JAX hands over may not be written to."""
    plain = np.array(array, order="C").reshape(-1).view(np.uint8)
    return torch.from_numpy(plain).view(DTYPES[str(array.dtype)]).view(array.shape)


def _to_numpy(tensor: torch.Tensor, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    shaped: np.ndarray[Any, Any] = plain.view(like.dtype).reshape(like.shape)
    return shaped
