"""Some of the parameters, with their optimizer states: what one server holds, and what pushes make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ....comm.engine.grad_ownership import replace_grad
from ....core.vocabulary.errors import CommError, ConfigError, FarandoleError, Mismatch
from ..channel import ServerMessage, read_problem, write_problem
from .refuse import make_optimizer, read_group

# Which server has which elements: the flat order of all parameters, cut by bytes.


@dataclass(frozen=True)
class ShardPiece:
    """Consecutive elements of one parameter, at one server."""

    parameter: int
    """Its place in the flat order."""
    begin: int
    end: int
    """Elements of the parameter, counted in the order of its indices."""


def cut_by_bytes(parameters: Sequence[torch.Tensor], servers: int) -> list[list[ShardPiece]]:
    """Return the pieces of each server: contiguous, and equal in bytes but for an element at each cut."""
    total = sum(each.nbytes for each in parameters)
    dealt: list[list[ShardPiece]] = [[] for _ in range(servers)]
    before = 0
    for number, each in enumerate(parameters):
        width, elements = each.element_size(), each.numel()
        for server in range(servers):
            # The first element of a server is the first that begins at its share of the bytes, or after it.
            ends = (-(-(total * place // servers - before) // width) for place in (server, server + 1))
            begin, end = (min(elements, max(0, place)) for place in ends)
            if end > begin:
                dealt[server].append(ShardPiece(number, begin, end))
        before += each.nbytes
    return dealt


def part_of(tensor: torch.Tensor, piece: ShardPiece) -> torch.Tensor:
    """Return a piece of a tensor, (elements,) in CPU memory of its own."""
    flat = tensor.detach().reshape(-1)[piece.begin : piece.end]
    return flat.cpu().clone() if flat.device.type == "cpu" else flat.cpu()


@torch.no_grad()
def put_part(tensor: torch.Tensor, piece: ShardPiece, values: torch.Tensor) -> None:
    """Write a piece into a tensor, whatever the order of its elements in memory."""
    if tensor.is_contiguous():
        tensor.detach().view(-1)[piece.begin : piece.end].copy_(values)
        return
    flat = tensor.detach().reshape(-1)
    flat[piece.begin : piece.end].copy_(values)
    tensor.copy_(flat.view(tensor.shape))


# States of an optimizer, cut as its parameters are: what has a parameter's shape is cut, one number is copied.

Written = dict[str, list[Any]]
"""JSON, by name of a state: ["cut", place of the tensor], ["tensor", place] or ["number", value]."""


def write_state(
    state: Mapping[str, Any], shape: torch.Size, piece: ShardPiece, tensors: list[torch.Tensor]
) -> Written:
    """Return the part of a parameter's state that belongs to `piece`; its tensors are added to `tensors`.

    Raises `ConfigError` for a state of another shape.
    """
    written: Written = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.shape != shape:
            written[name] = ["tensor", len(tensors)]
            tensors.append(value.detach().cpu().clone())
        elif isinstance(value, torch.Tensor) and value.shape == shape:
            written[name] = ["cut", len(tensors)]
            tensors.append(part_of(value, piece))
        elif value is None or isinstance(value, (bool, int, float)):
            written[name] = ["number", value]
        else:
            shown = f"the shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(
                f"a server cannot hold the state {name!r} of an optimizer: it is of {shown}, and its parameter of "
                f"{tuple(shape)}"
            )
    return written


def read_state(written: Written, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Return the state of a piece, whose parameter is the piece."""
    return {
        name: tensors[value].clone() if kind in ("cut", "tensor") else value
        for name, (kind, value) in written.items()
    }


def join_state(
    state: dict[str, Any],
    parameter: torch.Tensor,
    piece: ShardPiece,
    written: Written,
    tensors: list[torch.Tensor],
) -> None:
    """Put what a server has of a piece into the `state` of the whole parameter."""
    for name, (kind, value) in written.items():
        if kind == "cut":
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=tensors[value].dtype)
            put_part(state[name], piece, tensors[value])
        else:
            state[name] = tensors[value].clone() if kind == "tensor" else value


SERVICE = "dense"


class DenseShard:
    """A service. It applies entries of `clocks.Clocks` in their order, each when its pushes are there."""

    is_behind = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: nothing; what is held comes with ``install``."""
        self._parameters: list[torch.nn.Parameter] = []
        """One for each piece, (elements,)."""
        self._optimizers: list[Optimizer | None] = []
        """None: no piece here is of that one."""
        self._installed: dict[str, Any] = {}
        """Values of the last ``install``."""
        self._pushes: dict[tuple[int, int], ServerMessage] = {}
        """By rank and step: what no entry has used yet."""
        self._entries: dict[int, Mapping[str, Any]] = {}
        """Those that are not applied yet, by how many come before them all in all."""
        self._version = 0
        """Entries that are applied."""
        self._reads: dict[int, tuple[int, bool]] = {}
        """Ranks that wait for a version, and whether for states too."""
        self._gone: set[int] = set()
        self._failed: FarandoleError | None = None

    def handle(self, client: int, request: ServerMessage) -> ServerMessage | None:
        """``install``, ``push``, ``apply`` and ``pull``."""
        values = request.values
        if values["do"] == "pull":
            self._reads[client] = values["version"], values["states"]
            return None
        if values["do"] == "push":
            self._pushes[client, values["step"]] = request
        elif values["do"] == "apply":
            for number, entry in enumerate(values["entries"], start=values["first"]):
                if number >= self._version:
                    self._entries[number] = entry
        elif values["do"] == "install":
            self._install(values, list(request.tensors))
        else:
            raise ConfigError(f"a shard cannot {values['do']!r}")
        self._apply_what_is_there()
        return ServerMessage({})

    def due(self) -> Sequence[tuple[int, ServerMessage | FarandoleError]]:
        """Return the parameters to ranks that wait for a version which is there now."""
        replies: list[tuple[int, ServerMessage | FarandoleError]] = []
        for rank, (version, with_states) in list(self._reads.items()):
            if self._failed is None and not (self._installed and self._version >= version):
                continue
            del self._reads[rank]
            replies.append((rank, self._failed or self._read(with_states)))
        return replies

    def client_left(self, client: int) -> None:
        """No entry can wait for what it will push."""
        self._gone.add(client)
        self._check_lost()

    def state(self) -> ServerMessage:
        """Return all of it."""
        tensors: list[torch.Tensor] = []
        states = self._write_states(tensors)
        parameters = [each.detach().clone() for each in self._parameters]
        pushes = []
        for (rank, step), push in self._pushes.items():
            pushes.append([rank, step, dict(push.values), len(push.tensors)])
        values = {
            "installed": self._installed, "version": self._version,
            "entries": sorted(self._entries.items()),
            "gone": sorted(self._gone), "pushes": pushes, "states": states, "state_tensors": len(tensors),
            "failed": None if self._failed is None else write_problem(self._failed),
        }  # fmt: skip
        pushed = [each for push in self._pushes.values() for each in push.tensors]
        return ServerMessage(values, [*parameters, *tensors, *pushed])

    def load(self, state: ServerMessage) -> None:
        """Go on from `state`."""
        values, tensors = state.values, list(state.tensors)
        self._gone = set(values["gone"])
        if values["installed"]:
            count = len(values["installed"]["pieces"])
            own = {**values["installed"], "states": values["states"]}
            self._install(own, tensors[: count + values["state_tensors"]])
            self._installed = dict(values["installed"])
            tensors = tensors[count + values["state_tensors"] :]
        self._version, self._entries = values["version"], dict(values["entries"])
        if values["failed"] is not None:
            self._failed = read_problem(values["failed"], rank=0, operation="push")
        for rank, step, said, count in values["pushes"]:
            self._pushes[rank, step] = ServerMessage(said, tensors[:count])
            tensors = tensors[count:]

    # -- parts -----------------------------------------------------------------------------------

    def _install(self, values: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Hold other parameters and states; what was pushed before is of no use."""
        pieces = values["pieces"]
        self._parameters = [torch.nn.Parameter(each.clone()) for each in tensors[: len(pieces)]]
        rest = tensors[len(pieces) :]
        self._optimizers = []
        for number, optimizer in enumerate(values["optimizers"]):
            groups: list[list[torch.nn.Parameter]] = [[] for _ in optimizer["groups"]]
            for parameter, (of, group) in zip(self._parameters, pieces, strict=True):
                if of == number:
                    groups[group].append(parameter)
            made = make_optimizer(optimizer["class"], groups, optimizer["groups"]) if any(groups) else None
            self._optimizers.append(made)
        for parameter, (of, _), written in zip(self._parameters, pieces, values["states"], strict=True):
            made = self._optimizers[of]
            if made is not None and written:
                made.state[parameter] = read_state(written, rest)
        self._installed = {**values, "states": []}
        self._version, self._failed = values["version"], None
        self._entries = {number: each for number, each in self._entries.items() if number >= self._version}
        self._pushes.clear()  # all of them are of steps before: ranks wait while one installs

    def _apply_what_is_there(self) -> None:
        while self._installed and self._version in self._entries and self._failed is None:
            of = self._entries[self._version]["of"]
            if any((rank, step) not in self._pushes for rank, step, _ in of):
                break
            entry = self._entries.pop(self._version)
            pushes = [self._pushes.pop((rank, step)) for rank, step, _ in of]
            self._version += 1
            try:
                self._step(pushes, [weight for _, _, weight in of], entry["rate"])
            except FarandoleError as problem:
                self._failed = problem
            except Exception as problem:  # a server that died of it would be restored, and die of it again
                self._failed = ConfigError(
                    f"a server cannot make step {pushes[0].values['step']}: {type(problem).__name__}: {problem}",
                    remedy="change no more in the groups of an optimizer than learning rates and the like",
                )
        self._check_lost()

    def _check_lost(self) -> None:
        """See whether an entry waits for a push that will never come."""
        for entry in self._entries.values():
            for rank, step, _ in entry["of"]:
                if rank in self._gone and (rank, step) not in self._pushes:
                    self._failed = CommError(
                        f"the gradients of step {step} of rank {rank}, which is gone, were lost with the server "
                        "that had them",
                        rank=rank,
                        operation="push",
                        remedy="go on from the last checkpoint, and set fewer snapshot_seconds",
                    )

    def _step(self, pushes: list[ServerMessage], weights: list[float], rate: float) -> None:
        """Make the step of one entry: the weighed sum in the order of ranks, and one step of the optimizer."""
        first = pushes[0].values
        for push in pushes[1:]:
            if (push.values["optimizer"], push.values["groups"]) != (first["optimizer"], first["groups"]):
                raise Mismatch(
                    f"step {first['step']}: ranks step other optimizers, or with other hyperparameters: "
                    f"{_shown(first)} and {_shown(push.values)}",
                    rank=0,
                    operation="push",
                    remedy="step the same optimizers in the same order, with the same schedule, on all ranks",
                )
        optimizer = self._optimizers[first["optimizer"]]
        if optimizer is None or not rate:
            return
        sums: dict[int, torch.Tensor] = {}
        for push, weight in zip(pushes, weights, strict=True):
            for place, gradient in zip(push.values["places"], push.tensors, strict=True):
                if not weight:  # a placeholder may hold anything
                    sums.setdefault(place, torch.zeros_like(gradient))
                elif place not in sums:
                    sums[place] = gradient * weight
                else:
                    sums[place].add_(gradient, alpha=weight)
        for place, gradient in sums.items():
            replace_grad(self._parameters[place], gradient)
        for group, said in zip(optimizer.param_groups, first["groups"], strict=True):
            group.update(read_group(said))
            group["lr"] *= rate
        optimizer.step()
        optimizer.zero_grad()

    def _read(self, with_states: bool) -> ServerMessage:
        parameters = [each.detach().clone() for each in self._parameters]
        tensors: list[torch.Tensor] = []
        states = self._write_states(tensors) if with_states else []
        return ServerMessage({"version": self._version, "states": states}, [*parameters, *tensors])

    def _write_states(self, tensors: list[torch.Tensor]) -> list[Written]:
        found = []
        for parameter, (of, _) in zip(self._parameters, self._installed.get("pieces", []), strict=True):
            optimizer = self._optimizers[of]
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            found.append(write_state(state, parameter.shape, ShardPiece(0, 0, parameter.numel()), tensors))
        return found


def _shown(push: Mapping[str, Any]) -> str:
    return f"optimizer {push['optimizer']} with {[group.get('lr') for group in push['groups']]}"
