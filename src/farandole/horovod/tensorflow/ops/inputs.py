"""What operations take, checked in one place; and functions that autograph leaves as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from ....core.env import read_elastic_settings
from ...common.process_sets import ProcessSet
from ..errors import raised_in_eager
from ..installed import tf
from .call import set_rank_op, size_op, torch_type

F = TypeVar("F", bound=Callable[..., Any])


def not_converted(function: F) -> F:
    """Return a function that autograph calls as it is, where it would rewrite the source of others."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def invalid(title: str, text: str) -> Exception:
    """Return the error for an argument of the operation `title`.

    As in Horovod a ValueError while a graph is made, and tf.errors.InvalidArgumentError outside graphs; ours is a
    ValueError too.
    """
    return raised_in_eager(ValueError(text), title) if tf.executing_eagerly() else ValueError(f"{title}: {text}")


def as_tensor(value: Any, title: str) -> Any:
    """Return a value as a dense tensor that can travel.

    Raises:
        ValueError: it is ragged, sparse or symbolic, no tensor at all, or has a type that cannot travel.
    """
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise invalid(title, f"a {type(value).__name__} cannot travel; give a dense tensor or tf.IndexedSlices")
    if type(value).__name__ == "KerasTensor":
        raise invalid(
            title,
            "a symbolic tensor of Keras has no values to exchange; call the operation inside a layer's `call`",
        )
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as problem:
        raise invalid(title, f"{value!r:.80} is no tensor ({problem})") from None
    try:
        torch_type(tensor.dtype)
    except ValueError as problem:
        raise invalid(title, f"{problem} Types that travel: numbers and bool") from None
    return tensor


def refuse_scalar(tensor: Any, title: str) -> None:
    """Raise for a tensor without a dimension, where the operation needs rows."""
    if tensor.shape.rank == 0:
        text = f"{title.removeprefix('Horovod')} does not support scalar inputs"
        if not tf.executing_eagerly():  # Horovod's words while a graph is made
            raise ValueError(f"Horovod{text}. Give them a dimension")
        raise invalid(title, f"{text} (give them a dimension)")


def as_tensors(values: Sequence[Any], title: str) -> list[Any]:
    """Return the members of a group as dense tensors."""
    return [as_tensor(value, title) for value in check_group(values, title)]


def check_group(values: Any, title: str) -> Any:
    """Return the tensors of a group; raise ValueError for a single tensor, and for what is no list of any."""
    if not isinstance(values, (list, tuple)):
        raise invalid(title, f"{values!r:.80} is no group; give a list or tuple of tensors, also of a single one")
    return values


def list_of_variables(variables: Any, title: str) -> list[Any]:
    """Return variables that are to be overwritten as a list; raise ValueError for what is none."""
    if isinstance(variables, str) or not isinstance(variables, Iterable) or hasattr(variables, "assign"):
        raise ValueError(
            f"{title}: {variables!r:.80}: expected a list of variables, for example model.weights, or [variable]"
        )
    given = list(variables)
    for place, each in enumerate(given):
        if not hasattr(each, "assign"):
            raise ValueError(
                f"{title}: number {place} is {each!r:.80}, which cannot be overwritten; expected variables of "
                "TensorFlow or Keras, for example model.weights (not model.get_weights())"
            )
    return given


def size_of(process_set: ProcessSet) -> Any:
    """Return the number of ranks of a set: a number; in elastic jobs a tensor, which graphs read when they run."""
    return process_set.size() if read_elastic_settings() is None else size_op(process_set.process_set_id or 0)


def rank_in(process_set: ProcessSet) -> Any:
    """Return this rank's place in a set: a number; in elastic jobs a tensor, which graphs read when they run."""
    if read_elastic_settings() is None:
        return process_set.rank()
    return tf.cast(set_rank_op(process_set), tf.int32)


def rows_unknown(tensor: Any) -> Any:
    """Return the static shape of a result whose first dimension the other ranks decide."""
    shape = tensor.shape
    if shape.rank is None:
        return tf.TensorShape(None)
    return tf.TensorShape([None, *shape[1:]]) if shape.rank else tf.TensorShape(None)
