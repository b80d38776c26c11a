"""Servers as a policy: an optimizer's step sends its gradients, and takes the parameters that come of all ranks'.

See `clocks` for the order of steps, `shard` for what becomes of gradients, `server.client` for lost connections.

[Note: a step at a server] In ``optimizer.step()`` a rank sends gradients and hyperparameters to all servers,
tells the first one that its step is done, waits until it may go on, carries the new entries to all servers, and
takes the parameters of the newest. Its own optimizer finds no gradients, so it changes nothing and keeps no
state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ....comm.gradients.grad_ownership import GradsAside
from ....comm.world.world import World
from ....core.vocabulary.errors import ConfigError
from ....core.vocabulary.notice import write_notice
from ....core.vocabulary.spec import Plan
from ....core.vocabulary.sync_spec import SyncSpec
from ..client import wait_for
from ..message import Message
from . import clock_service, shard
from .clock_service import DRAIN, INSTALL, INSTALLED
from .connect import connect_servers
from .hyperparameters import write_group
from .layout import cut_by_bytes, part_of, put_part
from .refuse import parameters_of, refuse_model
from .states import join_state, write_state


class ServerSync:
    """The policy of one model. To be made by all ranks, with equal parameters and states."""

    has_own_states = False
    """After `drain` all ranks have the same optimizer states."""
    is_local = True
    """Gradients of a rank are its own."""

    def __init__(
        self, here: World, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, *,
        why_not: Callable[[Optimizer], str],
    ) -> None:  # fmt: skip
        """Start the servers, and give them parameters and states. Raises `ConfigError` and `LaunchError`.

        `why_not`: says why the work of an optimizer cannot be divided by elements; an empty text if it can.
        """
        self._here, self._text, self._spec = here, plan.sync, SyncSpec.parse(plan.sync)
        refuse_model(model, optimizers, plan, why_not)
        self._parameters = parameters_of(model, optimizers)
        """Each with the numbers of its optimizer and its group, in the flat order."""
        self._places = {each.parameter: number for number, each in enumerate(self._parameters)}
        self._seen_optimizers = [weakref.ref(each) for each in optimizers]
        self._kinds = [type(each).__name__ for each in optimizers]
        tensors = [each.parameter for each in self._parameters]
        count = self._spec.servers or here.node_count
        self._pieces = cut_by_bytes(tensors, count)
        """By server."""
        shard_bytes = -(-sum(each.nbytes for each in tensors) // count)
        self._servers = connect_servers(here, self._spec, shard_bytes)
        self._step = self._version = self._gathers = self._undrained = 0
        """Steps of this rank, entries that it has, times it met the others, steps since the last `drain`."""
        self._ranks = list(range(here.size))
        """Those that train."""
        self._counts: dict[int, int] = {}
        self._aside: GradsAside | None = None
        self._is_loaded = self._is_averaged = self._is_filled = self._is_closed = False
        for each in optimizers:
            each.register_load_state_dict_post_hook(_Loaded(self))
        weakref.finalize(model, here.session.let_go_later, self._servers.close).atexit = False
        here.session.call_on_close(self.close)
        here.session.call_in_forked_child(self.forget)
        self._install(optimizers)

    # -- what a loop asks ------------------------------------------------------------------------

    @property
    def staleness(self) -> dict[int, int]:
        """How many pushes had been applied so many pushes after the parameters that their gradients are of.

        Of all ranks, as of this rank's last step or `drain`.
        """
        return dict(self._counts)

    def step_begins(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """An optimizer is about to step; `is_scaled`: by a `GradScaler`. Raises `ConfigError`."""
        if is_scaled:
            raise ConfigError(
                f'plan: sync = "{self._text}" with a GradScaler, which leaves out steps on some ranks alone',
                remedy='use bfloat16 (precision = "bf16"), or leave sync out',
            )
        if self._is_averaged:
            raise ConfigError(
                "an optimizer steps inside fd.averaged, where the model has the servers' parameters",
                remedy="leave fd.averaged before the next step",
            )

    def gradients_ready(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The gradients of a step are ready. See [Note: a step at a server]."""
        if has_closure:
            raise ConfigError(
                f'plan: sync = "{self._text}" with optimizer.step(closure), which evaluates the model on its own',
                remedy="call backward() before optimizer.step()",
            )
        number = next((i for i, each in enumerate(self._seen_optimizers) if each() is optimizer), None)
        if number is None:
            return
        if self._is_loaded:
            self._install(self._optimizers)
        self._push(number, optimizer)
        share = self._here.session.batch_weight.factor
        first = self._servers.clients[0]
        first.ask(
            clock_service.SERVICE,
            {"do": "finish", "step": self._step, "share": share, "read": self._version, "seen": self._version},
            keeps=True,
        )
        self._wait_first()
        self._step += 1
        self._undrained += 1
        self._follow(self._clocks({"do": "wait"}))
        self._write(self._pull(with_states=False))
        if self._is_filled:
            self._drop_states()
        self._aside = GradsAside([p for group in optimizer.param_groups for p in group["params"]])

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, over no gradients: they are put back."""
        if self._aside is not None:
            self._aside.restore()
            self._aside = None

    def drain(self) -> None:
        """Take the parameters that come of all pushes of all ranks; to be called by all of them."""
        if self._is_loaded:
            self._install(self._optimizers)
        self._gather(DRAIN)
        self._undrained = 0
        self._write(self._pull(with_states=False))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the servers' parameters as they are now; afterwards its own again, to the bit."""
        if self._is_averaged:
            yield
            return
        self._follow(self._clocks({"do": "look"}))
        own = [each.parameter.detach().clone() for each in self._parameters]
        self._write(self._pull(with_states=False))
        self._is_averaged = True
        try:
            yield
        finally:
            self._is_averaged = False
            with torch.no_grad():
                for each, value in zip(self._parameters, own, strict=True):
                    each.parameter.copy_(value)

    def close(self) -> None:
        """Leave the servers, which end when all ranks have."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._here.rank == 0 and self._spec.staleness != 0:
            counts = ", ".join(f"{stale}: {count}" for stale, count in sorted(self._counts.items()))
            write_notice(f"sync {self._text}: pushes by their staleness: {counts}")
            if self._undrained and not self._here.sockets.shut_down:
                write_notice(
                    f"{self._undrained} steps were made since farandole.drain(model), and the ranks have "
                    "parameters of other versions"
                )
        self._servers.close()

    def forget(self) -> None:
        """In a forked child: use no connection, and close its copies."""
        self._is_closed = True
        self._servers.forget()

    # -- state -----------------------------------------------------------------------------------

    def note_state_dict(self) -> None:
        """A state dict of the model is taken: it has what this rank has taken last."""

    def note_loaded(self) -> None:
        """The model was given other parameters, or an optimizer other states: the servers are at the next step."""
        if not self._is_averaged:
            self._is_loaded = True

    def gather_states(self) -> None:
        """Let the optimizers have the servers' states until the next step; to be called by all ranks."""
        reply = self._pull(with_states=True)
        states = self._write(reply)
        self._drop_states()
        for each, state in zip(self._parameters, states, strict=True):
            optimizer = self._seen_optimizers[each.optimizer]()
            if optimizer is not None and state:
                optimizer.state[each.parameter] = {
                    name: _as_torch_keeps(name, value, each.parameter) for name, value in state.items()
                }
        self._is_filled = True

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: all is in the model and, after `gather_states`, in the optimizers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the servers what was loaded into model and optimizers; to be called by all ranks."""
        self._install(self._optimizers)

    # -- requests --------------------------------------------------------------------------------

    @property
    def _optimizers(self) -> list[Optimizer]:
        found = (each() for each in self._seen_optimizers)
        return [each for each in found if each is not None]

    def _wait_first(self) -> Message:
        clients = self._servers.clients
        return wait_for(clients[:1], self._here.timeout_seconds, beside=clients[1:])[0]

    def _clocks(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the first server where all ranks are."""
        first = self._servers.clients[0]
        first.ask(clock_service.SERVICE, {**values, "seen": self._version}, keeps=False)
        said = self._wait_first().values
        self._ranks, self._counts = list(said["ranks"]), dict(said["staleness"])
        return said

    def _gather(self, what: str) -> None:
        """Wait until all ranks do `what`."""
        self._gathers += 1
        self._follow(self._clocks({"do": "gather", "what": what, "number": self._gathers}))

    def _follow(self, said: Mapping[str, Any]) -> None:
        """Carry entries that this rank has not had to all servers."""
        entries = said["entries"]
        if entries:
            self._ask_all(
                [{"do": "apply", "first": self._version, "entries": entries}] * len(self._pieces), keeps=True
            )
            self._version += len(entries)

    def _push(self, number: int, optimizer: Optimizer) -> None:
        groups = [write_group(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._places:
                    raise ConfigError(
                        f'plan: sync = "{self._text}": an optimizer has a parameter of shape '
                        f"{list(parameter.shape)} that did not train when farandole.distribute was called, and no "
                        "server has it",
                        remedy="call farandole.distribute when all parameters that will train do",
                    )
        values, tensors = [], []
        for pieces in self._pieces:
            places, parts = [], []
            for place, piece in enumerate(pieces):
                known = self._parameters[piece.parameter]
                gradient = known.parameter.grad
                if known.optimizer != number or gradient is None:
                    continue
                if gradient.layout != torch.strided:
                    raise ConfigError(
                        f'plan: sync = "{self._text}" with a gradient of layout {gradient.layout}',
                        remedy="use sparse=False",
                    )
                places.append(place)
                parts.append(part_of(gradient, piece))
            values.append(
                {"do": "push", "step": self._step, "optimizer": number, "groups": groups, "places": places}
            )
            tensors.append(parts)
        self._ask_all(values, tensors, keeps=True)

    def _pull(self, *, with_states: bool) -> list[Message]:
        value = {"do": "pull", "version": self._version, "states": with_states}
        return self._ask_all([value] * len(self._pieces), keeps=False)

    def _ask_all(
        self, values: Sequence[Mapping[str, Any]], tensors: Sequence[Sequence[torch.Tensor]] = (), *, keeps: bool
    ) -> list[Message]:
        clients = self._servers.clients
        for number, client in enumerate(clients):
            client.ask(shard.SERVICE, values[number], tensors[number] if tensors else (), keeps=keeps)
        return wait_for(clients, self._here.timeout_seconds)

    @torch.no_grad()
    def _write(self, replies: Sequence[Message]) -> list[dict[str, Any]]:
        """Give the model the parameters of `replies`, by server; return the states that came with them."""
        states: list[dict[str, Any]] = [{} for _ in self._parameters]
        for pieces, reply in zip(self._pieces, replies, strict=True):
            rest = list(reply.tensors[len(pieces) :])
            for piece, values in zip(pieces, reply.tensors, strict=False):
                put_part(self._parameters[piece.parameter].parameter, piece, values)
            for piece, written in zip(pieces, reply.values["states"], strict=False):
                parameter = self._parameters[piece.parameter].parameter
                join_state(states[piece.parameter], parameter, piece, written, rest)
        return states

    def _install(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the servers begin with the parameters and states that the first rank has; called by all ranks."""
        self._gather(INSTALL)
        if self._here.rank == self._ranks[0]:
            values, tensors = [], []
            said = [{"class": kind, "groups": [write_group(group) for group in each.param_groups]}
                    for kind, each in zip(self._kinds, optimizers, strict=True)]  # fmt: skip
            for pieces in self._pieces:
                parts = [part_of(self._parameters[piece.parameter].parameter, piece) for piece in pieces]
                of, states = [], []
                rest: list[torch.Tensor] = []
                for piece in pieces:
                    known = self._parameters[piece.parameter]
                    state = optimizers[known.optimizer].state.get(known.parameter, {})
                    of.append([known.optimizer, known.group])
                    states.append(write_state(state, known.parameter.shape, piece, rest))
                values.append({
                    "do": "install", "version": self._version, "optimizers": said, "pieces": of, "states": states,
                })  # fmt: skip
                tensors.append([*parts, *rest])
            self._ask_all(values, tensors, keeps=True)
        self._gather(INSTALLED)
        self._is_loaded = False
        self._write(self._pull(with_states=False))
        self._drop_states()

    def _drop_states(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._is_filled = False


class _Loaded:
    """A hook of an optimizer. One that was copied or saved with it does nothing."""

    def __init__(self, policy: ServerSync) -> None:
        self._policy = weakref.ref(policy)

    def __call__(self, *_: Any) -> None:
        policy = self._policy()
        if policy is not None:
            policy.note_loaded()

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Any:
    return lambda *_: None


def _as_torch_keeps(name: str, value: Any, parameter: torch.Tensor) -> Any:
    """Return a state where its optimizer would have it: on the parameter's device, but for a count of steps."""
    if not isinstance(value, torch.Tensor) or name == "step":
        return value
    return value.to(parameter.device)
