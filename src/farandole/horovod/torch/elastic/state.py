"""Model, optimizer, sampler and plain attributes as the state of an elastic job.

[Note: a commit is whole] What is kept is replaced when all of the new is there, in one assignment each: a copy
that fails, out of memory or because a rank dies in the middle of `sync`, leaves the commit before as it was,
in all of its parts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ....comm.engine.grad_ownership import drop_grads
from ...common.elastic import ObjectState
from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from ..mpi_ops import rank
from .sampler import ElasticSampler


class StateHandler:
    """How one kind of value is saved, restored and copied. Subclass it for kinds of your own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep the value as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the value of rank 0, and keep it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Take another object from now on, and keep it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """For what has `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._kept: Any = None
        self.save()

    def captured(self) -> Any:
        """Return a copy of the state, which nothing changes any more."""
        return copy.deepcopy(self.value.state_dict())

    def keep(self, captured: Any) -> None:
        """Keep what `captured` returned."""
        self._kept = captured

    def receive(self) -> None:
        """Take the value of rank 0."""
        raise NotImplementedError

    def save(self) -> None:
        """Keep a copy of the state."""
        self.keep(self.captured())

    def restore(self) -> None:
        """Load the state that was kept; a copy of it, as an optimizer goes on to use what it is given."""
        self.value.load_state_dict(copy.deepcopy(self._kept))

    def sync(self) -> None:
        """Take the value of rank 0, and keep it."""
        self.receive()
        self.save()


class ModelStateHandler(_StateDictHandler):
    """Parameters and buffers."""

    def restore(self) -> None:
        """Load what was kept. Gradients of the step that failed go: nothing may be added to them."""
        super().restore()
        drop_grads(self.value.parameters())

    def receive(self) -> None:
        """Overwrite parameters and buffers with those of rank 0."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """State and options of an optimizer."""

    def receive(self) -> None:
        """Take state and options of rank 0's."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_StateDictHandler):
    """How far an epoch is."""

    def receive(self) -> None:
        """Go on where rank 0 is, with the share of this rank."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def reset(self) -> None:
        """Divide the remaining samples over the current ranks."""
        self.value.reset()


Registry = Sequence[tuple[type, type[StateHandler]]]

_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the kinds of values and their handlers; the first kind that fits is taken."""
    return list(_registry)


def set_handler_registry(registry: Registry) -> None:
    """Replace the kinds of values and their handlers, for states made from now on."""
    _registry[:] = list(registry)


class TorchState(ObjectState):
    """Model, optimizer, samplers and further values; those without a handler are plain attributes.

    All of them are attributes: ``state.model``, ``state.epoch``; setting one replaces what is saved and copied.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, StateHandler] = {}
        for name, value in list(given.items()):
            kind = next((handler for kind, handler in _registry if isinstance(value, kind)), None)
            if kind is not None:
                self._handlers[name] = kind(given.pop(name))
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **given)

    def save(self) -> None:
        """Keep everything as it is now. See [Note: a commit is whole]."""
        attributes = self._captured()
        self._keep_all(attributes)

    def restore(self) -> None:
        """Go back to what was kept last, all of it."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take everything from rank 0, and keep it when all of it is there."""
        for handler in self._handlers.values():
            if isinstance(handler, _StateDictHandler):
                handler.receive()
            else:
                handler.sync()
        attributes = self._received()
        for name, value in attributes.items():
            setattr(self, name, value)
        self.save()

    def reset(self) -> None:
        """Adapt to another number of ranks."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.reset()

    def _keep_all(self, attributes: dict[str, Any]) -> None:
        ours = {name: each for name, each in self._handlers.items() if isinstance(each, _StateDictHandler)}
        captured = {name: handler.captured() for name, handler in ours.items()}
        for handler in self._handlers.values():
            if not isinstance(handler, _StateDictHandler):
                handler.save()
        for name, handler in ours.items():
            handler.keep(captured[name])
        self._saved_state = attributes

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        super().__setattr__(name, value)
