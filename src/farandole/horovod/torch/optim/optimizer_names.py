"""What a distributed optimizer is given, checked: names, groups, and the texts scripts know its errors by."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...common.util import split_list

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)
EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)

Names = dict[torch.Tensor, str]
"""Parameters by identity, with their names."""


def name_parameters(param_groups: Sequence[Mapping[str, Any]], named_parameters: Iterable[Any] | None) -> Names:
    """Return the name of every parameter; without `named_parameters` its place in the groups.

    Raises `ValueError` for names that are not (name, parameter) tuples, not unique, or missing.
    """
    if named_parameters is None:
        return {
            parameter: noname(number, index)
            for number, group in enumerate(param_groups)
            for index, parameter in enumerate(group["params"])
        }
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = find_duplicates([name for name, _ in named])
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. "
            f"Found duplicates: {', '.join(sorted(duplicates))}"
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [id(p) for group in param_groups for p in group["params"] if id(p) not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(map(str, unnamed))}"
        )
    return {parameter: name for name, parameter in sorted(named, key=lambda entry: str(entry[0]))}


def noname(group: int, index: int) -> str:
    """Return the name of a parameter that was given none."""
    return f"allreduce.noname.{group}.{index}"


def find_duplicates(names: Iterable[str]) -> set[str]:
    """Return those that occur more than once."""
    seen: set[str] = set()
    return {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]


def check_passes(passes: int) -> None:
    """Raise `ValueError` unless at least one backward pass makes a step."""
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")


def choose_groups(groups: Any, num_groups: int, names: Names) -> tuple[tuple[str, ...], ...]:
    """Return which parameters, by name, are to travel as one; the rest travel alone.

    `groups`: None, how many groups to make of all trainable parameters in the order of their names, or lists of
    parameters. Raises `ValueError` for anything else.
    """
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=3,
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return ()
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        trainable = sorted(name for parameter, name in names.items() if parameter.requires_grad)
        return tuple(tuple(part) for part in split_list(trainable, groups) if part) if groups else ()
    if not isinstance(groups, (list, tuple)) or any(not isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    members = [parameter for group in groups for parameter in group]
    if any(not isinstance(parameter, torch.Tensor) for parameter in members):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(parameter) for parameter in members}) < len(members):
        raise ValueError("A parameter can only appear once in groups.")
    # A frozen one has no gradient to send, and one of another optimizer is not ours to send.
    return tuple(
        tuple(names[p] for p in group if p in names and p.requires_grad)
        for group in groups
        if any(p in names and p.requires_grad for p in group)
    )
