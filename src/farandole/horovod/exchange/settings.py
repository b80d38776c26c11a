"""How the gradients of one optimizer or tape meet, as its arguments say."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.compression import check_compression
from ..common.process_sets import ProcessSet, global_process_set
from ..common.reductions import Adasum, Average, Sum
from ..common.util import split_list


@dataclass(frozen=True)
class GradientSettings:
    """The arguments that optimizers and tapes have in common."""

    compression: Any
    op: int = Average
    predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    groups: Any = None
    """A number, lists of variables, or None."""
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    passes: int = 1
    """Backward passes whose gradients are added up before they travel."""
    averages_passes: bool = False
    """Whether their sum is divided by their number."""


def make_settings(
    compression: Any,
    *,
    op: int,
    predivide_factor: float,
    groups: Any,
    num_groups: int = 0,
    passes: int = 1,
    **others: Any,
) -> GradientSettings:
    """Return the settings; raise ValueError for arguments that are invalid."""
    if predivide_factor != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor not supported with op != Average (got {predivide_factor!r})")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op currently only supports Average, Sum and Adasum (got {op!r})")
    if not isinstance(others.get("process_set", global_process_set), ProcessSet):
        raise ValueError(f"process_set={others['process_set']!r}: expected a ProcessSet")
    if op == Adasum and others.get("averages_passes"):
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    if isinstance(passes, bool) or not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0 (got {passes!r})")
    return GradientSettings(
        check_compression(compression),
        op,
        predivide_factor,
        groups=check_groups(groups, num_groups),
        passes=passes,
        **others,
    )


def local_variables(local_layers: Any) -> list[Any]:
    """Return the variables of one or several layers that stay on this rank; None: of none.

    Raises ValueError for what is no layer, and for a layer that has no variables yet: it would travel later.
    """
    layers = [] if local_layers is None else local_layers
    found: list[Any] = []
    for layer in layers if isinstance(layers, (list, tuple, set)) else [layers]:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
        if not getattr(layer, "built", True):
            raise ValueError(
                f"local_layers: {layer.name} has no variables yet: build the model, by an Input or one call, "
                "before its layers are given"
            )
        found += layer.trainable_weights
    return found


def check_groups(groups: Any, num_groups: int) -> Any:
    """Return `groups`, or the older `num_groups`; raise ValueError for what is neither a number nor lists."""
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=4,
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    is_number = isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0
    is_lists = isinstance(groups, (list, tuple)) and all(isinstance(each, (list, tuple)) for each in groups)
    if not is_number and not is_lists:
        raise ValueError(
            f"groups should be a non-negative integer or a list of list of tf.Variable. (got {groups!r:.120})"
        )
    return groups


def group_numbers(groups: Any, variables: Sequence[Any], key: Callable[[Any], int] = id) -> dict[int, int]:
    """Return the group of each variable that is in one, by its place in `variables`.

    Variables are told apart by what they are, not by name: names need not be unique.

    Raises:
        ValueError: a variable is in two groups, or is none of `variables`.
    """
    if not groups:
        return {}
    if isinstance(groups, int):
        parts = split_list(range(len(variables)), min(groups, max(1, len(variables))))
        return {place: number for number, part in enumerate(parts) for place in part}
    places = {key(variable): place for place, variable in enumerate(variables)}
    found: dict[int, int] = {}
    for number, group in enumerate(groups):
        for variable in group:
            place = places.get(key(variable))
            if place is None:
                raise ValueError(f"groups: {getattr(variable, 'name', variable)} is no variable of this optimizer")
            if place in found:
                raise ValueError(f"groups: {getattr(variable, 'name', variable)} is there twice")
            found[place] = number
    return found
