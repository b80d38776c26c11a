"""`fd.gather`: values of all ranks on every rank, each sample of the data once.

[Note: gathered samples] In the loop over a divided loader a rank whose batch is a placeholder adds nothing, and
the ranks' rows one after the other are the job's batch in its order. After the loop, a value with one row for each
sample that the loop has handed out, on every rank, comes in the order of the epoch, without the placeholder. Any
other rows are those of rank 0, then those of rank 1, and so on.

[Note: gradients of gathered rows] Each rank computes the loss of the joined batch from all ranks' rows, and lets
gradients flow back through its own rows alone. The exchange takes the mean over the ranks, in which rank r weighs
f_r / N: so what flows back to its rows is multiplied by N / f_r, and the mean is the sum over all rows, which is
the gradient of one process. A parameter of the loss itself (a temperature) has the same gradient on every rank,
which is then the mean.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..comm.messages import bytes_of
from ..comm.world.comm_errors import translated
from ..comm.world.store_sync import all_gather_json, require_equal
from ..comm.world.world import World, world
from ..core.vocabulary.errors import ConfigError, Mismatch
from ..core.vocabulary.text import name_ranks
from .data.position import EpochRows, LatestLoop

# A nest of containers taken apart into its leaves, and put together again from others.
#
# Dicts and tuples are structure. Tensors, NumPy arrays and lists are rows; everything else is one value of a
# rank.

Kind = Literal["tensor", "array", "list", "value"]


@dataclass(frozen=True)
class Leaf:
    """What is gathered by itself."""

    path: str
    """Where it stands, as ``['boxes'][0]``; empty: the value is the leaf."""
    kind: Kind
    value: Any
    """A tensor without gradient for the kinds "tensor" and "array", else the object."""

    @property
    def rows(self) -> int | None:
        """How many rows it has; None: a single value."""
        if self.kind == "list":
            return len(self.value)
        if self.kind == "value" or not self.value.dim():
            return None
        return int(self.value.shape[0])

    @property
    def form(self) -> str:
        """What must be the same on all ranks."""
        if self.kind in ("list", "value"):
            return f"a {'list' if self.kind == 'list' else 'single value'}"
        shape = ", ".join(["*", *map(str, self.value.shape[1:])][: self.value.dim()])
        return f"a {self.kind} of {str(self.value.dtype).removeprefix('torch.')} and shape [{shape}]"


def take_apart(value: Any) -> tuple[list[Leaf], Callable[[list[Any]], Any]]:
    """Return the leaves of a nest, and what makes the same nest of as many other values."""
    leaves: list[Leaf] = []
    build = _walk(value, "", leaves)
    return leaves, lambda values: build(iter(values))


def _walk(value: Any, path: str, leaves: list[Leaf]) -> Callable[[Any], Any]:
    if isinstance(value, Mapping):
        names = sorted(value, key=repr)  # ranks may have put them in in another order
        parts = {name: _walk(value[name], f"{path}[{name!r}]", leaves) for name in names}

        def mapping(values: Any) -> Any:
            made = {name: parts[name](values) for name in names}
            return {name: made[name] for name in value}

        return mapping
    if isinstance(value, tuple):
        items = [_walk(item, f"{path}[{i}]", leaves) for i, item in enumerate(value)]
        kind = type(value)
        if hasattr(kind, "_fields"):
            return lambda values: kind(*(item(values) for item in items))
        return lambda values: tuple(item(values) for item in items)
    leaves.append(_leaf(path, value))
    return next


def tensors_with_gradients(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a nest as they are, by the paths of their leaves."""
    if isinstance(value, Mapping):
        parts = [tensors_with_gradients(value[name], f"{path}[{name!r}]") for name in value]
    elif isinstance(value, tuple):
        parts = [tensors_with_gradients(item, f"{path}[{i}]") for i, item in enumerate(value)]
    else:
        return {path: value} if isinstance(value, torch.Tensor) else {}
    return {name: tensor for part in parts for name, tensor in part.items()}


def _leaf(path: str, value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        return Leaf(path, "tensor", value.detach())
    if isinstance(value, list):
        return Leaf(path, "list", value)
    array = _as_tensor(value)
    return Leaf(path, "value", value) if array is None else Leaf(path, "array", array)


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a NumPy array of numbers as a tensor."""
    if (
        type(value).__module__ != "numpy"
        or not hasattr(value, "__array_interface__")
        or not hasattr(value, "resize")
    ):
        return None  # NumPy is not imported for this; its scalars are values
    try:
        return torch.from_numpy(value.copy())
    except TypeError:  # of texts or objects
        return None


# Rows of all ranks in which this rank's own keep their gradient: for a loss over the joined batch.


class _OwnRows(torch.autograd.Function):
    """`rows`, of which those from `begin` to `end` are `own`."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, rows: torch.Tensor, place: slice, scale: Callable[[], float]) -> Any:
        ctx.place, ctx.scale, ctx.shape = place, scale, own.shape
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mine = gradients[0][ctx.place]
        own = mine * ctx.scale() if mine.shape == ctx.shape else mine.new_zeros(ctx.shape)
        return own, None, None, None


def with_own(own: torch.Tensor, rows: torch.Tensor, counts: Sequence[int], here: World) -> torch.Tensor:
    """Return `rows` of all ranks, of which this rank's are `own`. See [Note: gradients of gathered rows].

    Args:
        own: this rank's rows, with their gradient.
        rows: of all ranks, one rank after the other.
        counts: how many of them each rank has; 0 for a rank with a placeholder, which gets gradients of zero.
        here: the world.
    """
    weight = here.session.batch_weight
    factor = weight.factor

    def scale() -> float:
        mine = weight.at_backward(factor)
        return here.size / mine if mine else 0.0

    begin = sum(counts[: here.rank])
    found: torch.Tensor = _OwnRows.apply(own, rows, slice(begin, begin + counts[here.rank]), scale)
    return found


def has_gathered(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was computed from rows of all ranks that `with_own` made."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "_OwnRowsBackward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


_OPERATION = "fd.gather"
_SAME_SAMPLES = ("pipeline", "tensor")
"""Ranks that differ in these degrees alone have the same samples: the first of them gives its values."""


def gather(value: Any, *, gradients: bool = False) -> Any:
    """Return the values of all ranks, on every rank. Call it on all ranks.

    Dicts and tuples are structure, and the result has the same. In it

    - a tensor or NumPy array becomes that of all ranks' rows; ranks may have different numbers of rows, and none.
      A tensor without dimensions becomes one with an element for each rank;
    - a list is a sequence of samples of any type: the lists become one;
    - anything else (a number, a text) becomes a list with one item for each rank.

    For metrics every sample appears once: called in the loop over a loader of `shard`, a placeholder's rows are
    left out; called after the loop, rows come in the order of the epoch, as one process would have them. Tensors
    keep device and type, and have no gradient unless `gradients` is set.

    Args:
        value: this rank's value: tensors, arrays, lists, numbers, and dicts and tuples of them.
        gradients: if True, this rank's own rows keep their gradient, so that a loss which compares the samples of
            a batch, computed alike on every rank, has the gradient of one process. Only inside the training loop.

    Returns:
        The same structure, with all ranks' values.

    Raises:
        ConfigError: a tensor that cannot travel (sparse, nested, quantized), or gradients after the loop; raised
            on every rank.
        Mismatch: the ranks' structures, types or shapes differ, or some ranks are still in a loop that others have
            ended; raised on every rank.
    """
    here = world()
    leaves, build = take_apart(value)
    rows = here.session.keep(LatestLoop, LatestLoop).rows
    problem = next(filter(None, map(_problem, leaves)), "")
    forms = [[leaf.path, leaf.form, leaf.rows, _is_empty(leaf)] for leaf in leaves]
    gathered = all_gather_json(
        here, _OPERATION, [problem, forms, None if rows is None else asdict(rows), gradients]
    )
    _refuse(here, gathered)
    require_equal(here, _OPERATION, "gradients", [each[3] for each in gathered])
    if gradients and here.degrees.size_over(_SAME_SAMPLES) > 1:
        raise ConfigError(
            f"gather: gradients=True with {here.degrees}, where several ranks compute the loss of one sample",
            remedy="gather values without gradients, or set tensor = 1 and pipeline = 1",
        )
    loops = [None if each[2] is None else EpochRows(**each[2]) for each in gathered]
    everything = _exchange(here, leaves, gathered)
    if gradients and all(loop is not None and loop.has_ended for loop in loops):
        raise ConfigError("gather: gradients=True after the loop over a loader", remedy=_IN_THE_LOOP)
    kept = here.degrees.first_ranks(_SAME_SAMPLES)
    once, theirs = [everything[rank] for rank in kept], [loops[rank] for rank in kept]
    joined = [_joined(leaf, i, once, theirs) for i, leaf in enumerate(leaves)]
    own = tensors_with_gradients(value) if gradients else {}
    for i, leaf in enumerate(leaves):
        tensor = own.get(leaf.path)
        if tensor is not None and tensor.dim() and tensor.requires_grad:
            counts = [0 if _is_cut(loop) else len(each[i]) for each, loop in zip(everything, loops, strict=True)]
            joined[i] = with_own(tensor, joined[i], counts, here)
    return build(joined)


_IN_THE_LOOP = "a loss is computed in the loop, from the batch in use; after it gather values for metrics"


# -- what is refused -------------------------------------------------------------------------------


def _problem(leaf: Leaf) -> str:
    if leaf.kind != "tensor":
        return ""
    tensor = leaf.value
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        return f"value{leaf.path} is a {kind} tensor"
    return "" if tensor.device.type != "meta" else f"value{leaf.path} is on the meta device"


def _is_empty(leaf: Leaf) -> bool:
    """Whether it has no rows, so that its type and shape may be those of a tensor that was never filled."""
    return leaf.kind in ("tensor", "array") and leaf.value.dim() > 0 and leaf.value.numel() == 0


def _refuse(here: World, gathered: Sequence[Any]) -> None:
    """Raise what is wrong, on all ranks alike."""
    problems = [f"{problem} on rank {rank}" for rank, (problem, *_) in enumerate(gathered) if problem]
    if problems:
        raise ConfigError(
            f"gather: {', '.join(problems[:3])}", remedy="give dense tensors, as tensor.to_dense() does"
        )
    _refuse_different_loops(here, [each[2] for each in gathered])
    require_equal(
        here, _OPERATION, "the structure of the value", [[path for path, *_ in each[1]] for each in gathered]
    )
    for row in zip(*(each[1] for each in gathered), strict=True):
        filled = [form for _, form, _, is_empty in row if not is_empty] or [row[0][1]]
        forms = [filled[0] if is_empty and _adopts(form, filled[0]) else form for _, form, _, is_empty in row]
        require_equal(here, _OPERATION, f"value{row[0][0]}", forms, remedy=_RAGGED)


def _adopts(empty: str, filled: str) -> bool:
    """Whether a tensor without rows may be taken for one of the form of another rank's."""
    return empty.partition(" of ")[0] == filled.partition(" of ")[0] and not filled.endswith("[]")


_RAGGED = "give the same types and shapes but for the first dimension; a list may hold tensors of any shape"


def _refuse_different_loops(here: World, loops: Sequence[Any]) -> None:
    """Name ranks that call from the loop over a loader that others have left: the calls do not belong together."""
    if any(loop is None for loop in loops) or len({(loop["loader"], loop["epoch"]) for loop in loops}) > 1:
        return
    inside = [rank for rank, loop in enumerate(loops) if not loop["has_ended"]]
    if inside and len(inside) < len(loops):
        raise Mismatch(
            f"{name_ranks(inside)} gathered in the loop over a loader, and the others after it",
            rank=here.rank,
            operation=_OPERATION,
            remedy="with fd.shard(..., evaluate=True) ranks may have different numbers of batches: "
            "gather after the loop",
        )


# -- what travels ------------------------------------------------------------------------------------


def _exchange(here: World, leaves: Sequence[Leaf], gathered: Sequence[Any]) -> list[list[Any]]:
    """Return every rank's leaves, by rank: all bytes of a rank travel as one tensor."""
    if here.size == 1:
        return [[leaf.value for leaf in leaves]]
    tensors = [leaf.value for leaf in leaves if leaf.kind in ("tensor", "array")]
    others = [_on_host(leaf.value) for leaf in leaves if leaf.kind in ("list", "value")]
    pickled = pickle.dumps(others) if others else b""
    pieces = [_to_bytes(tensor).to(here.device) for tensor in tensors]
    if pickled:
        pieces.append(torch.frombuffer(bytearray(pickled), dtype=torch.uint8).to(here.device))
    flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=here.device)
    lengths = [int(each) for each in all_gather_json(here, f"{_OPERATION}/bytes", flat.numel())]
    padded = flat.new_zeros(max(lengths))
    padded[: flat.numel()] = flat
    parts = [torch.empty_like(padded) for _ in lengths]
    if max(lengths):
        with translated(here, _OPERATION):
            dist.all_gather(parts, padded, group=here.group)
    return [
        _unpack(leaves, gathered, rank, part[:length])
        for rank, (part, length) in enumerate(zip(parts, lengths, strict=True))
    ]


def _unpack(leaves: Sequence[Leaf], gathered: Sequence[Any], rank: int, flat: torch.Tensor) -> list[Any]:
    found: list[Any] = [None] * len(leaves)
    begin = 0
    for i, leaf in enumerate(leaves):
        if leaf.kind not in ("tensor", "array"):
            continue
        like = _filled(leaf, i, gathered)
        rows = gathered[rank][1][i][2]
        shape = like.shape if rows is None else (rows, *like.shape[1:])
        if gathered[rank][1][i][3]:  # empty: of whatever shape it was there
            found[i] = like.new_empty((0, *like.shape[1:]))
            continue
        end = begin + torch.Size(shape).numel() * like.element_size()
        found[i] = flat[begin:end].clone().view(like.dtype).reshape(shape).to(leaf.value.device)
        begin = end
    if begin < flat.numel():
        others = iter(pickle.loads(flat[begin:].cpu().numpy().tobytes()))
        for i, leaf in enumerate(leaves):
            if leaf.kind in ("list", "value"):
                found[i] = next(others)
    return found


def _filled(leaf: Leaf, index: int, gathered: Sequence[Any]) -> torch.Tensor:
    """Return a tensor of the type and the shape of a row that this leaf has where it has rows."""
    tensor: torch.Tensor = leaf.value
    form = next(
        (form for _, form, _, is_empty in (each[1][index] for each in gathered) if not is_empty), leaf.form
    )
    if form == leaf.form:
        return tensor
    name, _, shape = form.removesuffix("]").partition(" and shape [")
    row = [int(each) for each in shape.split(", ")[1:]]
    return torch.empty((0, *row), dtype=getattr(torch, name.rpartition(" ")[2]), device=tensor.device)


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return bytes_of(tensor)


def _on_host(value: Any) -> Any:
    """Return a nest with its tensors on the CPU, which every rank has, without gradients and shared memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if type(value) in (list, tuple):
        return type(value)(_on_host(each) for each in value)
    if type(value) is dict:
        return {name: _on_host(each) for name, each in value.items()}
    return value


# -- one leaf of all ranks ---------------------------------------------------------------------------


def _joined(leaf: Leaf, index: int, everything: Sequence[list[Any]], loops: Sequence[EpochRows | None]) -> Any:
    parts = [each[index] for each in everything]
    if leaf.kind == "value":
        return parts
    if leaf.rows is None and leaf.kind == "tensor":
        return torch.stack(parts)
    if leaf.rows is None:
        return torch.stack(parts).numpy()
    order = _order_of_epoch(parts, loops)
    if order is None:
        kept = [part[:0] if _is_cut(loop) else part for part, loop in zip(parts, loops, strict=True)]
    else:
        kept = parts
    if leaf.kind == "list":
        flat = [item for part in kept for item in part]
        return flat if order is None else [flat[i] for i in order]
    rows = torch.cat(kept)
    rows = rows if order is None else rows[torch.tensor(order, dtype=torch.int64, device=rows.device)]
    return rows.numpy() if leaf.kind == "array" else rows


def _is_cut(loop: EpochRows | None) -> bool:
    """Whether the batch in use is a placeholder."""
    return loop is not None and not loop.has_ended and loop.is_placeholder


def _order_of_epoch(parts: Sequence[Any], loops: Sequence[EpochRows | None]) -> list[int] | None:
    """Return which rows of all ranks', one after the other, come in the order of an epoch that was looped over.

    None: the rows are not those of the epoch.
    """
    known = [loop for loop in loops if loop is not None and loop.has_ended]
    if len(known) < len(loops) or len({(loop.loader, loop.epoch) for loop in known}) > 1:
        return None
    counted = [sum(samples * times for samples, times in loop.runs) for loop in known]
    for part, loop, count in zip(parts, known, counted, strict=True):
        if len(part) not in (count, count + loop.is_placeholder):
            return None
    begins = [sum(map(len, parts[:rank])) for rank in range(len(parts))]
    batches = [iter([samples for samples, times in loop.runs for _ in range(times)]) for loop in known]
    order: list[int] = []
    while rounds := [list(islice(each, 1)) for each in batches]:
        if not any(rounds):
            break
        for rank, found in enumerate(rounds):
            count = found[0] if found else 0
            order += range(begins[rank], begins[rank] + count)
            begins[rank] += count
    return order
