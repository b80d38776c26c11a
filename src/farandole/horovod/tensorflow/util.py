"""Small helpers under the names that programs import from `horovod.tensorflow.util`."""

from __future__ import annotations

from typing import Any


class _KerasReference:
    """What can be hashed and stands for a variable of Keras 3, which has no `ref` of its own."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def deref(self) -> Any:
        """Return the variable."""
        return self._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KerasReference) and other._variable is self._variable


def vars_to_refs(vars: Any) -> Any:  # noqa: A002 - the name of Horovod's parameter
    """Return what can be hashed and stands for a variable; for a list of variables a tuple of those.

    Args:
        vars: a variable of TensorFlow or Keras, or a list of such, lists in it too.
    """
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref() if hasattr(vars, "ref") else _KerasReference(vars)


def refs_to_vars(refs: Any) -> Any:
    """Return the variables that `vars_to_refs` was given, as a list where it was given a list.

    Args:
        refs: what `vars_to_refs` returned.
    """
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(each) for each in refs]
    return refs.deref()


__all__ = ["refs_to_vars", "vars_to_refs"]
