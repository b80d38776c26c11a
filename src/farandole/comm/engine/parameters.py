"""What a reducer is given: options of a front end, and parameters by their gradients: rows, squares, order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...core.vocabulary.errors import CommError, ConfigError

# How a front end configures its reducer: when ranks connect, what the result is, what travels along.


class ExtraTensors(Protocol):
    """Something small that travels with every exchange, launched before the first bucket."""

    def prepare(self) -> bool:
        """Agree with all ranks on what will travel, and return whether anything will.

        Called once, in the first pass.
        """

    def pack(self, weight: float) -> torch.Tensor:
        """Return the tensor to sum over the ranks in place, of the same shape on all ranks in every exchange.

        `weight`: this rank's share of the samples.
        """

    def unpack(self) -> None:
        """Take the sum."""


def _unchanged(problem: CommError) -> Exception:
    return problem


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class ReducerOptions:
    """What differs between front ends; see `DEFAULT_OPTIONS`."""

    model: str = "this model"
    """What notices call it, such as the class of the model."""
    lazy_init: bool = False
    """Connect to the other ranks in the first exchange, not in the constructor."""
    before_connecting: Callable[[], None] = _nothing
    """Called before the first message to the other ranks."""
    reduce_op: Literal["mean", "sum"] = "mean"
    """What gradients become over the ranks."""
    is_compared: bool = False
    """Whether the parameters are known to be the same on all ranks."""
    include_frozen: bool = False
    """Exchange all parameters that required a gradient in the constructor, frozen since or not."""
    on_second_gradient: Callable[[str], Exception | None] | None = None
    """Makes the error for a parameter's second gradient between two calls of `begin_step`; None: it is fine."""
    mesh: DeviceMesh | None = None
    """All ranks, to which the rows of gradients are divided; None: every rank gets all of them."""
    map_error: Callable[[CommError], Exception] = _unchanged
    """What is raised in a backward pass for a failure of communication."""


DEFAULT_OPTIONS = ReducerOptions()
"""What `fd.distribute` needs."""


# Where the rows of several tensors lie in a flat tensor of one block for each rank: pure, on shapes.
#
# Each rank owns some rows (slices along the first dimension) of every tensor: those that `torch.chunk` gives it,
# which is how a DTensor with placement ``Shard(0)`` is divided. Block b holds the rows of rank ``owners[b]``,
# side by side. All blocks have the same length.

ALIGNMENT_BYTES = 64
"""The rows of every tensor begin on a cache line."""


class Rows(NamedTuple):
    """Some rows of one tensor, and where they lie in their block."""

    begin: int
    end: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """In elements, from the begin of the block."""


def rows_of(rows: int, size: int, rank: int) -> tuple[int, int]:
    """Return the first of `rows` rows that `rank` of `size` owns, and the one behind its last.

    >>> [rows_of(5, 3, rank) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    length = -(-rows // size)
    return min(rank * length, rows), min((rank + 1) * length, rows)


class RowBlocks:
    """The layout of `tensors` in one block a rank. Every tensor has at least one dimension."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], *, tail: int = 0, multiple: int = 1
    ) -> None:
        """Lay out; `owners`: rank by block.

        Behind its rows a block has `tail` elements for who sends it, and is a multiple of `multiple` elements and
        of a cache line long.
        """
        self.owners = tuple(owners)
        line = max(1, ALIGNMENT_BYTES // tensors[0].element_size())
        self.rows: list[list[Rows]] = []
        """By block, then by tensor."""
        longest = 0
        for owner in self.owners:
            offset, block = 0, []
            for tensor in tensors:
                begin, end = rows_of(tensor.shape[0], len(self.owners), owner)
                lengths, strides = layout_of(tensor[begin:end])
                block.append(Rows(begin, end, lengths, strides, offset))
                offset += -(-tensor[begin:end].numel() // line) * line
            self.rows.append(block)
            longest = max(longest, offset)
        self.tail = longest
        """Where the tail begins in each block."""
        unit = max(line, multiple)
        self.block_elements = -(-(longest + tail) // unit) * unit

    @property
    def elements(self) -> int:
        """Elements of all blocks."""
        return self.block_elements * len(self.owners)

    def cut(self, flat: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the rows of every tensor in one block of `flat`, in their shapes."""
        return self.views(flat[block * self.block_elements : (block + 1) * self.block_elements], block)

    def views(self, memory: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the rows of every tensor in `memory`, which is laid out as one block."""
        start = int(memory.storage_offset())
        return [memory.as_strided(each.lengths, each.strides, start + each.offset) for each in self.rows[block]]


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Lengths and strides of a gradient in its bucket."""


def layout_of(parameter: torch.Tensor) -> Layout:
    """Return how the gradient of `parameter` is to lie in memory: as the parameter does, where that is dense.

    Optimizers have fast paths only for gradients that lie in memory as their parameters do.
    """
    lengths = tuple(parameter.shape)
    strides, step = [0] * len(lengths), 1
    dense = _is_dense(parameter)
    for i in reversed(range(len(lengths))):
        strides[i] = parameter.stride(i) if dense else step
        step *= max(1, lengths[i])
    return lengths, tuple(strides)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def describe_parameter(name: str, parameter: torch.nn.Parameter) -> list[tuple[str, object]]:
    """Return what must be equal on all ranks, with its name for error messages, for `require_same`.

    Strides among it, but for dimensions of one element, where they say nothing: elements are added up in the
    order in which they lie in memory.
    """
    lengths, strides = layout_of(parameter)
    strides_that_count = [stride for stride, length in zip(strides, lengths, strict=True) if length > 1]
    return [
        (f"parameter {name!r}", [list(lengths), str(parameter.dtype).removeprefix("torch.")]),
        (f"strides of parameter {name!r}", strides_that_count),
        (f"device of parameter {name!r}", parameter.device.type),
    ]


class ParameterTable:
    """The parameters of one reducer, by index: their names, and how their gradients are to lie in memory."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.index_of = {name: index for index, name in enumerate(self.names)}
        self.index_by_id = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.layouts = [layout_of(parameter) for parameter in self.parameters]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """All parameters with their names."""
        return list(zip(self.names, self.parameters, strict=True))

    def describe(self) -> list[tuple[str, object]]:
        """Return what must be equal on all ranks, and let gradients lie as their parameters do now, for ever."""
        self.layouts = [layout_of(parameter) for parameter in self.parameters]
        return [fact for name, parameter in self.named for fact in describe_parameter(name, parameter)]


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return the device that `parameters` are on: another than the CPU where one of them is elsewhere."""
    return next((parameter.device for parameter in parameters if not parameter.is_cpu), torch.device("cpu"))


def relink_hooks(parameter: torch.Tensor) -> None:
    """Let the hooks after a gradient's accumulation run again: `swap_tensors` leaves them to the other tensor."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None and parameter.requires_grad and parameter.is_leaf:
        parameter._post_accumulate_grad_hooks = hooks


def require_dense_parameters(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise `ConfigError` for a parameter that has no memory yet."""
    for name, parameter in parameters:
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet", remedy="run one batch through the model first"
            )
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device", remedy="move the model to a real device first"
            )


# Backward passes that are to be differentiated again, where gradients of gradients would be wrong.


def refuse_second_order(what: str, why: str, *, remedy: str) -> None:
    """Raise `ConfigError` inside a backward pass with ``create_graph=True``.

    Args:
        what: the part of the plan that asks.
        why: what gradients of gradients would be or miss.
        remedy: what to do instead.
    """
    if torch.is_grad_enabled():
        raise ConfigError(
            f"{what}: a backward pass with create_graph=True: gradients of gradients {why}", remedy=remedy
        )


# Sums of squares of gradients: what a norm is made of.


@torch.no_grad()
def square_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all elements, a tensor () of float64; nothing is waited for.

    Each tensor is added up in float32 (float64 if it is of that), so narrow floats lose nothing.
    """
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return torch.zeros((), dtype=torch.float64)
    wide = torch.float64 if full[0].dtype in (torch.float64, torch.complex128) else torch.float32
    norms = torch._foreach_norm(full, 2, dtype=wide) if not full[0].is_complex() else torch._foreach_norm(full, 2)
    return torch.stack(list(norms)).to(torch.float64).square().sum()


def count_nonzero_gradients(parameters: Sequence[torch.Tensor], most: int) -> int:
    """Return how many of `parameters` have a gradient that is not zero, at most `most`; reads those there are."""
    found = 0
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        found += bool((local.coalesce()._values() if local.is_sparse else local).any())
        if found >= most:
            break
    return found
