"""The steps of a training on JAX, as ``farandole verify`` sees them.

[Note: the state on JAX] While `fit` runs, values are not in the variables of the model: a step takes them as a
state and returns the next one. Around a verified step they are put into the variables, where observers look for
them, and what observers have changed there goes into the step. Both are copies: JAX uses the memory of what a step
is given for its results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ...verify.arrays import replaced
from .backends import arrays_of
from .observer import FitObserver

State = tuple[list[Any], ...]


def watch_steps(model: Any, observers: Callable[[], Sequence[FitObserver]]) -> None:
    """Show each step that the model's train function makes from now on."""
    inner, calls = model.train_function, 0

    @functools.wraps(inner)
    def train_function(state: State, iterator: Iterator[Any]) -> Any:
        nonlocal calls
        looking = observers()
        _put(model, state)
        for each in looking:
            each.begins(model, calls)
        calls += 1
        batch = next(iterator)
        arrays = arrays_of(batch)
        if arrays is not None:
            for each in looking:
                each.batch(model, replaced(batch, iter(range(len(arrays)))), arrays)
        logs, state = inner(state_of(model), iter([batch]))
        _put(model, state)  # waits for the step, and so for its exchange
        for each in looking:
            each.ends(model, 1, logs)
        return logs, state

    model.train_function = train_function


def state_of(model: Any) -> State:
    """Return the values of a model's variables, as a step takes them."""
    return tuple([_copy(each.value) for each in variables] for variables in _variables(model))


def replay_step(model: Any, batch: Any) -> None:
    """Make a step outside the compiled program from the values of the variables, which stay as they are."""
    jax.block_until_ready(model.train_step(state_of(model), batch))


def _put(model: Any, state: State) -> None:
    for variables, values in zip(_variables(model), state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(_copy(value))


def _variables(model: Any) -> tuple[Sequence[Any], ...]:
    optimizer = model.optimizer.variables
    return model.trainable_variables, model.non_trainable_variables, optimizer, model.metrics_variables


def _copy(value: Any) -> Any:
    return jax.block_until_ready(jax.numpy.array(value, copy=True))
