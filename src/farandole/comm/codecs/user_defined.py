"""Codecs of the user: a generator function, or an object with `init` and `encode`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from ...core.vocabulary.codec_spec import Granularity
from ...core.vocabulary.errors import PlanError
from ..messages import Encoded, Encoding, GroupRank
from .codec import leaves


@dataclass(frozen=True)
class UserDefined:
    """Gives the user's codec a copy of the gradient, which it may overwrite, and checks what it returns.

    A function ``codec(grad, group)`` keeps nothing and returns ``mean, own``. An object with ``init(grad, group)``
    and ``encode(grad, state, group)`` is a `Codec`, and returns ``mean, own, state``.
    """

    name: str
    codec: Any

    @property
    def granularity(self) -> Granularity:
        """What the codec asks for by an attribute ``granularity``."""
        return "matrix" if getattr(self.codec, "granularity", "segment") == "matrix" else "segment"

    def init(self, grad: torch.Tensor, group: GroupRank) -> Any:
        """See `Codec`."""
        return self.codec.init(grad, group) if hasattr(self.codec, "encode") else None

    def encode(self, grad: torch.Tensor, state: Any, group: GroupRank) -> Encoding:
        """See `Codec`."""
        kept = {key: leaf for key, leaf in leaves(state).items() if isinstance(leaf, torch.Tensor)}
        versions = {key: leaf._version for key, leaf in kept.items()}
        if hasattr(self.codec, "encode"):
            rounds = self.codec.encode(grad.clone(), state, group)
        else:
            rounds = self.codec(grad.clone(), group)
        if not isinstance(rounds, Generator):
            raise TypeError(
                f"codec {self.name} returned {type(rounds).__name__}, expected a generator of messages"
            )
        result = Encoded(*(yield from rounds))
        for what, tensor in (("mean", result.mean), ("own contribution", result.own)):
            if tensor.shape != grad.shape:
                raise ValueError(
                    f"codec {self.name} returned a {what} of shape {tuple(tensor.shape)}, "
                    f"expected {tuple(grad.shape)}"
                )
        for key, leaf in kept.items():
            if leaf._version != versions[key]:
                raise ValueError(
                    f"codec {self.name} wrote into {key!r} of its state, which a dropped step restores: "
                    "return a new state"
                )
        return result


def import_codec(name: str) -> Any:
    """Return the function or object that ``module.attribute`` names; raise `PlanError` if there is none."""
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as problem:
        raise PlanError(
            f"codec {name!r}: {problem}", remedy="is its file on the PYTHONPATH of all ranks?"
        ) from None
    codec = getattr(module, attribute, None)
    if not callable(codec) and not hasattr(codec, "encode"):
        raise PlanError(f"codec {name!r}: module {module_name} has no function {attribute!r}")
    if hasattr(codec, "encode"):
        if not hasattr(codec, "init"):
            raise PlanError(f"codec {name!r} has encode(grad, state, group), but no init(grad, group)")
        _require_parameters(name, codec.init, "init(grad, group)", 2)
        _require_parameters(name, codec.encode, "encode(grad, state, group)", 3)
    else:
        _require_parameters(name, codec, f"{attribute}(grad, group)", 2)
    return codec


def _require_parameters(name: str, function: Any, expected: str, count: int) -> None:
    """Raise `PlanError` if `function` cannot be called with `count` arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function that does not say what it takes
    try:
        signature.bind(*range(count))
    except TypeError:
        raise PlanError(
            f"codec {name!r}: {getattr(function, '__name__', 'the codec')}{signature} cannot be called "
            f"with {count} arguments",
            remedy=f"expected {expected}; a codec with a state has init and encode, see docs/codecs.md",
        ) from None
