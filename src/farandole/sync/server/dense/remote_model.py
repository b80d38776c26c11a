"""The parameters of one model at its servers, as a rank sees them: what it sends there and takes from there."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ....comm.messages import bit_sums
from ....comm.world.world import World
from ....core.vocabulary.errors import ConfigError
from ....core.vocabulary.events import Exchange
from ....core.vocabulary.sync_spec import SyncSpec
from ....core.vocabulary.text import name_ranks, write_notice
from ..channel import ServerMessage
from ..client import wait_for
from . import clock_service, shard
from .connect import connect_servers
from .refuse import parameters_of, write_group
from .shard import cut_by_bytes, join_state, part_of, put_part, write_state


class RemoteModel:
    """To be made by all ranks. Requests that several ranks must make together say so."""

    def __init__(self, here: World, model: nn.Module, optimizers: Sequence[Optimizer], sync: str) -> None:
        """Start the servers and connect to them. Raises `ConfigError` and `LaunchError`, on all ranks."""
        self._here, self._text, spec = here, sync, SyncSpec.parse(sync)
        self._parameters = parameters_of(model, optimizers)
        """In the flat order."""
        self._known = {each.parameter: (each.optimizer, each.group) for each in self._parameters}
        self._group_counts = [len(each.param_groups) for each in optimizers]
        self._seen_optimizers = [weakref.ref(each) for each in optimizers]
        tensors = [each.parameter for each in self._parameters]
        count = spec.servers or here.node_count
        self._pieces = cut_by_bytes(tensors, count)
        """By server."""
        self.servers = connect_servers(here, spec, -(-sum(each.nbytes for each in tensors) // count))
        self.ranks = list(range(here.size))
        """Those that train."""
        self.staleness: dict[int, int] = {}
        self._step = self._version = self._gathers = 0
        """Steps of this rank, entries that it has, times it met the others."""
        self._is_filled = False
        """Whether the optimizers have the servers' states."""
        self.bit_sums: list[int] = []
        """`bit_sums` of the newest parameters that came from servers; empty: none came."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The model's own, which train."""
        return [each.parameter for each in self._parameters]

    def optimizers(self) -> list[Optimizer]:
        """Return those of the model that live."""
        found = (each() for each in self._seen_optimizers)
        return [each for each in found if each is not None]

    def step(self, optimizer: Optimizer, share: float) -> None:
        """Send the gradients of `optimizer`, wait until this rank may go on, and take the newest parameters.

        `share`: how many samples they are of, over the mean of the ranks.
        See [Note: a step at a server] in `policy`.
        """
        number = next(i for i, each in enumerate(self._seen_optimizers) if each() is optimizer)
        begin = time.monotonic()
        sent_bytes = self._push(number, optimizer)
        first = self.servers.clients[0]
        done = {"do": "finish", "step": self._step, "share": share, "read": self._version, "seen": self._version}
        first.ask(clock_service.SERVICE, done, keeps=True)
        self._wait_first()
        self._step += 1
        self._follow(self._clocks({"do": "wait"}))
        self.take()
        self._here.session.recorder.record(Exchange((begin,), begin, time.monotonic(), sent_bytes))
        if self._is_filled:
            self._drop_states()

    def look(self) -> None:
        """Take the parameters as they are now."""
        self._follow(self._clocks({"do": "look"}))
        self.take()

    def gather(self, what: str) -> None:
        """Wait until all ranks do `what`."""
        self._gathers += 1
        self._follow(self._clocks({"do": "gather", "what": what, "number": self._gathers}))

    def take(self) -> None:
        """Take the parameters of the version that this rank knows, or a newer one."""
        self._write(self._pull(with_states=False))

    def take_states(self) -> None:
        """Let the optimizers have the servers' states, until the next step."""
        replies = self._pull(with_states=True)
        self._write(replies)
        self._drop_states()
        self._fill_states(replies, but_for=())
        self._is_filled = True

    def is_changed(self) -> bool:
        """Return whether the model's parameters are no more those that were taken last."""
        return bool(self.bit_sums) and self.bit_sums != bit_sums(self.parameters).tolist()

    def install(self, loaded: Collection[Optimizer]) -> None:
        """Let the servers go on with the parameters that the first rank has; called by all ranks.

        `loaded`: optimizers whose states are those of the first rank too; others keep the servers'.

        Raises `ConfigError` where an optimizer is gone, whose states servers would be told without.
        """
        if len(self.optimizers()) < len(self._seen_optimizers):
            raise ConfigError(
                f'plan: sync = "{self._text}": parameters were loaded or changed, and an optimizer that '
                "farandole.distribute was given is gone, with what the servers must know of it",
                remedy="keep all optimizers as long as the model trains",
            )
        self.gather(clock_service.INSTALL)
        if self._here.rank == self.ranks[0]:
            if self.bit_sums:
                self._fill_states(self._pull(with_states=True), but_for=loaded)
            self._send_all(self.optimizers())
            for each in self.servers.clients:  # so that no push comes before it, where it is sent again
                each.save()
        self.gather(clock_service.INSTALLED)
        self.take()
        self._drop_states()

    # -- requests --------------------------------------------------------------------------------

    def _wait_first(self) -> ServerMessage:
        clients = self.servers.clients
        return wait_for(clients[:1], self._here.timeout_seconds, beside=clients[1:])[0]

    def _clocks(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the first server where all ranks are."""
        self.servers.clients[0].ask(clock_service.SERVICE, {**values, "seen": self._version}, keeps=False)
        said = self._wait_first().values
        gone = sorted(set(self.ranks) - set(said["ranks"]))
        self.ranks, self.staleness = list(said["ranks"]), dict(said["staleness"])
        if gone and self._here.rank == self.ranks[0]:
            write_notice(f"sync {self._text}: {name_ranks(gone)} ended, and the others go on")
        return said

    def _follow(self, said: Mapping[str, Any]) -> None:
        """Carry entries that this rank has not had to all servers."""
        entries = said["entries"]
        if entries:
            value = {"do": "apply", "first": self._version, "entries": entries}
            self._ask_all([value] * len(self._pieces), keeps=True)
            self._version += len(entries)

    def _push(self, number: int, optimizer: Optimizer) -> int:
        """Return how many bytes of gradients were sent."""
        groups = self._groups_of(number, optimizer)
        self._refuse_other_groups(number, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._known:
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
        return sum(each.nbytes for parts in tensors for each in parts)

    def _groups_of(self, number: int, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return what the groups say that the servers have; those that came later have nothing that trains."""
        return [write_group(group) for group in optimizer.param_groups[: self._group_counts[number]]]

    def _refuse_other_groups(self, number: int, optimizer: Optimizer) -> None:
        now = {p: (number, group) for group, each in enumerate(optimizer.param_groups) for p in each["params"]}
        for each in self._parameters:
            if each.optimizer == number and now.get(each.parameter) != self._known[each.parameter]:
                raise ConfigError(
                    f'plan: sync = "{self._text}": a parameter of shape {list(each.parameter.shape)} is no more '
                    f"in group {each.group} of its optimizer, where servers have it",
                    remedy="leave parameters in their groups; one with requires_grad = False does not train",
                )

    def _pull(self, *, with_states: bool) -> list[ServerMessage]:
        value = {"do": "pull", "version": self._version, "states": with_states}
        return self._ask_all([value] * len(self._pieces), keeps=False)

    def _send_all(self, optimizers: Sequence[Optimizer]) -> None:
        values, tensors = [], []
        said = [{"class": type(each).__name__, "groups": self._groups_of(number, each)}
                for number, each in enumerate(optimizers)]  # fmt: skip
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

    def _ask_all(
        self, values: Sequence[Mapping[str, Any]], tensors: Sequence[Sequence[torch.Tensor]] = (), *, keeps: bool
    ) -> list[ServerMessage]:
        clients = self.servers.clients
        for number, client in enumerate(clients):
            client.ask(shard.SERVICE, values[number], tensors[number] if tensors else (), keeps=keeps)
        return wait_for(clients, self._here.timeout_seconds)

    @torch.no_grad()
    def _write(self, replies: Sequence[ServerMessage]) -> None:
        """Give the model the parameters of `replies`, by server."""
        for pieces, reply in zip(self._pieces, replies, strict=True):
            for piece, values in zip(pieces, reply.tensors, strict=False):
                put_part(self._parameters[piece.parameter].parameter, piece, values)
        self.bit_sums = bit_sums(self.parameters).tolist()

    @torch.no_grad()
    def _fill_states(self, replies: Sequence[ServerMessage], but_for: Collection[Optimizer]) -> None:
        """Give optimizers the states that came with `replies`, where they have none."""
        states: list[dict[str, Any]] = [{} for _ in self._parameters]
        for pieces, reply in zip(self._pieces, replies, strict=True):
            rest = list(reply.tensors[len(pieces) :])
            for piece, written in zip(pieces, reply.values["states"], strict=True):
                parameter = self._parameters[piece.parameter].parameter
                join_state(states[piece.parameter], parameter, piece, written, rest)
        for each, state in zip(self._parameters, states, strict=True):
            optimizer = self._seen_optimizers[each.optimizer]()
            if optimizer is None or optimizer in but_for or not state or optimizer.state.get(each.parameter):
                continue
            optimizer.state[each.parameter] = {
                name: _as_torch_keeps(name, value, each.parameter) for name, value in state.items()
            }

    def _drop_states(self) -> None:
        for optimizer in self.optimizers():
            optimizer.state.clear()
        self._is_filled = False


def _as_torch_keeps(name: str, value: Any, parameter: torch.Tensor) -> Any:
    """Return a state where its optimizer would have it: on the parameter's device, but for a count of steps."""
    if not isinstance(value, torch.Tensor) or name == "step":
        return value
    return value.to(parameter.device)
