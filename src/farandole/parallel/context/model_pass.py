"""The forward pass of a model whose sequences are divided: agree, prove once, divide attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...comm.batch_weight.nested_tensors import tensors_in
from ...core.vocabulary.errors import ConfigError
from ..changed_class import ChangedClass
from .agreement import Compared, is_constant
from .context import Context
from .proof import prove
from .transformers_models import Inputs, prepare


class DividedSequences(ChangedClass):
    """The first base of a kin whose attention is divided over a context group."""

    _farandole_context: ModelPass

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the user's forward pass on this rank's tokens."""
        return self._farandole_context.run(self, super().forward, Inputs(arguments, named))


class ModelPass:
    """The forward passes of one model."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_proven = False
        self._is_in_pieces = False
        """Whether something else runs the model's own code. See `parallel.outer_pass`."""

    def run(self, model: nn.Module, plain: Any, inputs: Inputs) -> Any:
        """Run `plain`, the model's own forward pass, with divided attention."""
        context = self._context
        if context.is_closed or self._is_in_pieces:
            return plain(*inputs.arguments, **inputs.named)
        ready = self._ready(model, plain, inputs)
        with context.open_pass(ready.padding):
            output = plain(*ready.arguments, **ready.named)
        return context.weigh_outputs(output)

    def _ready(self, model: nn.Module, plain: Any, inputs: Inputs) -> Inputs:
        self._agree(model, inputs)
        ready = prepare(model, inputs, self._context.group)
        if not self._is_proven:
            prove(self._context, model, plain, inputs)
            self._is_proven = True
        return ready

    # -- a pass in pieces, an `OuterPass` ------------------------------------------------------------

    def begin(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Check the inputs of a pass; return those of the model's own code, a tuple or a dict."""
        plain: Any = super(DividedSequences, model)
        ready = self._ready(model, plain.forward, Inputs(arguments, named))
        if ready.padding is not None:
            raise ConfigError(
                f"context: a batch of this {type(model).__qualname__} has padding, and with a pipeline passes "
                "overlap that would have different padding, which is not there yet",
                remedy="use samples without padding, or pipeline = 1 in the plan",
            )
        return ready.named if ready.named else ready.arguments

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Divide attention in pieces of the model's own code."""
        before, self._is_in_pieces = self._is_in_pieces, True
        try:
            with self._context.open_pass(None):
                yield
        finally:
            self._is_in_pieces = before

    def end(self, output: Any) -> Any:
        """Return the model's output, through which gradients are weighed."""
        return self._context.weigh_outputs(output)

    def _agree(self, model: nn.Module, inputs: Inputs) -> None:
        tensors = list(tensors_in((inputs.arguments, inputs.named)))
        compared = Compared(self._context.group, "forward pass of divided sequences", tensors)
        compared.require_same_shapes("the input of the model")
        if tensors and compared.are_values_same and not is_constant(tensors):
            raise ConfigError(
                f"context: all ranks of a context group give this {type(model).__qualname__} the same input of "
                f"shape {tuple(tensors[0].shape)}, so sequences were not cut",
                remedy="tokens, targets = fd.context_shard(tokens, targets), before the model is called",
            )
