"""`FrozenWeight`: a parameter that is kept as packed whole numbers, and is decoded where it is used.

The module stays the one it was: its `weight` is still a parameter of that name, shape and dtype. A linear layer
decodes it in the forward pass and again in backward, so that between both only packed numbers are there; an
embedding decodes the rows it looks up. Every other operation gets the decoded tensor, for as long as it needs
it: autograd keeps what it is given, so the ``addmm`` of transformers' Conv1D keeps and decodes as a linear layer.

[Note: why not torchao] Version 0.18 of torchao has int8 weights with gradients to the input. On a CPU its 4-bit
weights either need a kernel library for GPUs (``Int4WeightOnlyConfig``), take a byte each
(``IntxWeightOnlyConfig``), or refuse embeddings and sizes that are no multiple of 64 (NF4). One form for both,
that checkpoints know without pickle, is what is here.

[Note: parts in shards] At ZeRO stage 3 the packed numbers and the scales are parameters of a module that the
model does not know. FSDP2 shards them by blocks, gathers them packed before a unit runs, and frees them. `packed`
and `scales` are DTensors then, or what was gathered; `decode` of a weight that is not gathered is a collective.

[Note: blocks of a weight] The elements, in the order of their indices, are cut into blocks. A block is its scale
times whole numbers, the largest of which is that of its largest element (absmax quantisation, Dettmers et al.
2022, "8-bit Optimizers via Block-wise Quantization", section 2.1). ``int8``: 64 elements, a float32 scale,
numbers to 127: 8.5 bits an element. ``int4``: 32 elements, a bfloat16 scale, numbers to 7: 4.5 bits. Shapes need
not fit: the last block is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from ..core.vocabulary.errors import ConfigError

# Weights as whole numbers of 8 or 4 bits, with one scale a block: pure functions on tensors.


class BlockForm(NamedTuple):
    """How a codec stores a block."""

    elements: int
    """Elements of a block."""
    most: int
    """The largest whole number."""
    scale_dtype: torch.dtype
    per_byte: int
    """Elements in a byte."""


FORMS = {"int8": BlockForm(64, 127, torch.float32, 1), "int4": BlockForm(32, 7, torch.bfloat16, 2)}


def encode_blocks(weight: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed numbers and the scales of a floating-point tensor. See [Note: blocks of a weight].

    Packed is int8 ``[blocks, 64]``, or uint8 ``[blocks, 16]`` with two numbers, each plus 8, in a byte: the even
    element in the low half.
    """
    form = FORMS[codec]
    flat = weight.detach().reshape(-1).to(torch.float32)
    blocks = -(-flat.numel() // form.elements)
    if blocks * form.elements != flat.numel():
        flat = torch.nn.functional.pad(flat, (0, blocks * form.elements - flat.numel()))
    rows = flat.view(blocks, form.elements)
    scales = (rows.abs().amax(1) / form.most).to(form.scale_dtype)
    wide = scales.to(torch.float32)[:, None]
    numbers = torch.where(wide > 0, rows / wide, 0.0).round_().clamp_(-form.most, form.most)
    if form.per_byte == 1:
        return numbers.to(torch.int8), scales
    halves = (numbers + 8).to(torch.uint8)
    return halves[:, 0::2] | (halves[:, 1::2] << 4), scales


def decode_blocks(packed: torch.Tensor, scales: torch.Tensor, codec: str) -> torch.Tensor:
    """Return the elements of blocks, float32 ``[blocks, elements]``."""
    if FORMS[codec].per_byte == 1:
        return packed.to(torch.float32) * scales[:, None]
    pairs = torch.stack((packed & 15, packed >> 4), 2).to(torch.float32)
    return pairs.sub_(8.0).mul_(scales.to(torch.float32)[:, None, None]).view(packed.shape[0], -1)


class FrozenWeight(torch.Tensor):
    """A tensor of a shape and dtype whose elements are stored by a codec. It takes no gradient."""

    stored: SimpleNamespace | nn.Module
    """Has `packed` and `scales`. See [Note: parts in shards]."""
    codec: str

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[FrozenWeight], packed: torch.Tensor, scales: torch.Tensor, codec: str,
        like: tuple[Sequence[int], torch.dtype],
    ) -> FrozenWeight:  # fmt: skip
        made = torch.Tensor._make_wrapper_subclass(cls, torch.Size(like[0]), dtype=like[1], device=packed.device)
        made.stored, made.codec = SimpleNamespace(packed=packed, scales=scales), codec
        return made

    @classmethod
    def encode(cls, weight: torch.Tensor, codec: str) -> FrozenWeight:
        """Return `weight` stored by `codec`, ``int8`` or ``int4``."""
        return cls(*encode_blocks(weight, codec), codec, (weight.shape, weight.dtype))

    @property
    def packed(self) -> torch.Tensor:
        """The packed numbers, by blocks."""
        stored: Any = self.stored
        found: torch.Tensor = stored.packed
        return found

    @property
    def scales(self) -> torch.Tensor:
        """The scales of the blocks."""
        stored: Any = self.stored
        found: torch.Tensor = stored.scales
        return found

    @property
    def stored_bytes(self) -> int:
        """Bytes of the packed numbers and the scales on this rank."""
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in self.parts.values()]
        return sum(each.untyped_storage().nbytes() for each in parts)

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """What is stored, by name."""
        return {"packed": self.packed, "scales": self.scales}

    def decode(self) -> torch.Tensor:
        """Return the elements, in new memory, in this tensor's dtype."""
        flat = decode_blocks(_whole(self.packed), _whole(self.scales), self.codec).view(-1)[: self.numel()]
        return flat.view(self.shape).to(self.dtype)

    def decode_rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows at `indices`, ``[*indices.shape, features]``."""
        features = self.shape[1]
        blocks, rest = divmod(features, FORMS[self.codec].elements)
        if rest:
            return functional.embedding(indices, self.decode())
        wanted = indices.reshape(-1)
        packed = _whole(self.packed).view(self.shape[0], -1)[wanted].view(wanted.numel() * blocks, -1)
        scales = _whole(self.scales).view(self.shape[0], blocks)[wanted].view(-1)
        return decode_blocks(packed, scales, self.codec).view(*indices.shape, features).to(self.dtype)

    def to_module(self) -> nn.Module:
        """Let the stored tensors be parameters of a new module, and return it. See [Note: parts in shards]."""
        module = nn.Module()
        for name, part in self.parts.items():
            module.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.stored = module
        return module

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return its shape, dtype and codec."""
        return f"FrozenWeight({tuple(self.shape)}, dtype={self.dtype}, codec={self.codec!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that is a parameter if this is one."""
        if id(self) not in memo:
            memo[id(self)] = as_parameter(self._with(torch.clone))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the stored tensors."""
        return _rebuild, (self.packed, self.scales, self.codec, tuple(self.shape), self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the tensors inside, and the rest; for `torch.compile`."""
        return ["packed", "scales"], (self.codec, tuple(self.shape), self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], rest: Any, size: Any, stride: Any) -> FrozenWeight:
        """Undo `__tensor_flatten__`."""
        return FrozenWeight(inner["packed"], inner["scales"], rest[0], (rest[1], rest[2]))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give linear layers and embeddings their own way; refuse to train."""
        kwargs = kwargs or {}
        own: Callable[..., Any] | None = _OWN.get(func)
        if own is not None:
            result = own(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is no class method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copies keep the stored form; other operations get the decoded tensor."""
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._alias()
        if func is aten.clone.default:
            return args[0]._with(torch.clone)
        if func is aten._to_copy.default:
            device, dtype = kwargs.get("device"), kwargs.get("dtype")
            if dtype is None or dtype.is_floating_point:
                return args[0]._with(lambda inner: inner.to(device=device, copy=True), dtype)
        if func is aten.copy_.default and isinstance(args[0], FrozenWeight):
            return args[0]._take(args[1])
        for given, argument in zip(args, func._schema.arguments, strict=False):
            if (
                isinstance(given, FrozenWeight)
                and argument.alias_info is not None
                and argument.alias_info.is_write
            ):
                raise RuntimeError(f"{func} would change a frozen weight, which is stored as {given.codec}")
        return func(*tree_map_only(FrozenWeight, FrozenWeight.decode, args),
                    **tree_map_only(FrozenWeight, FrozenWeight.decode, kwargs))  # fmt: skip

    def _alias(self) -> FrozenWeight:
        made = FrozenWeight(self.packed, self.scales, self.codec, (self.shape, self.dtype))
        made.stored = self.stored
        return made

    def _with(
        self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
    ) -> FrozenWeight:
        return FrozenWeight(
            change(self.packed), change(self.scales), self.codec, (self.shape, dtype or self.dtype)
        )

    def _take(self, other: torch.Tensor) -> FrozenWeight:
        """Become `other`, which is encoded if it is not."""
        if other.shape != self.shape:
            raise RuntimeError(
                f"a frozen weight of the shape {tuple(self.shape)} cannot become {tuple(other.shape)}"
            )
        if not isinstance(other, FrozenWeight) or other.codec != self.codec:
            dense = other.decode() if isinstance(other, FrozenWeight) else other
            other = FrozenWeight.encode(dense, self.codec)
        for mine, new in ((self.packed, other.packed), (self.scales, other.scales)):
            mine.copy_(_like(new, mine, is_sharded=isinstance(self.stored, nn.Module)))
        return self


def _whole(part: torch.Tensor) -> torch.Tensor:
    return part.full_tensor() if isinstance(part, DTensor) else part


def _like(new: torch.Tensor, mine: torch.Tensor, *, is_sharded: bool) -> torch.Tensor:
    """Return `new`, which every rank has whole or in shards, in shards if `mine` is."""
    if not isinstance(mine, DTensor):
        if is_sharded:
            raise RuntimeError("a frozen weight that is gathered for a pass cannot be changed: load between steps")
        return _whole(new)
    if isinstance(new, DTensor):
        return new
    return distribute_tensor(new, mine.device_mesh, mine.placements, src_data_rank=None)


def as_parameter(weight: FrozenWeight) -> torch.nn.Parameter:
    """Return `weight` as a parameter that does not train."""
    return torch.nn.Parameter(weight, requires_grad=False)


def _rebuild(
    packed: torch.Tensor, scales: torch.Tensor, codec: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.nn.Parameter:
    return as_parameter(FrozenWeight(packed, scales, codec, (shape, dtype)))


class _Linear(torch.autograd.Function):
    """A linear layer whose weight is decoded twice instead of kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: FrozenWeight,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.weight, ctx.dtypes = weight, (x.dtype, None if bias is None else bias.dtype)
        return functional.linear(x, weight.decode(), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        of_input = of_bias = None
        input_dtype, bias_dtype = ctx.dtypes
        if ctx.needs_input_grad[0]:
            of_input = (grad @ ctx.weight.decode().to(grad.dtype)).to(input_dtype)
        if ctx.needs_input_grad[2]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(bias_dtype)
        return of_input, None, of_bias


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:  # noqa: A002
    if not isinstance(weight, FrozenWeight) or isinstance(input, FrozenWeight) or isinstance(bias, FrozenWeight):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return _Linear.apply(input, weight, bias)


def _embedding(input: torch.Tensor, weight: torch.Tensor, *rest: Any, **named: Any) -> Any:  # noqa: A002
    if not isinstance(weight, FrozenWeight) or named.get("max_norm") is not None or any(rest[1:2]):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return weight.decode_rows(input)


def _refuse_training(weight: torch.Tensor, requires_grad: bool = True) -> Any:
    if requires_grad and isinstance(weight, FrozenWeight):
        raise ConfigError(
            f"a frozen weight that is stored as {weight.codec} cannot train",
            remedy="train adapters beside it, or let it require gradients before fd.distribute",
        )
    return NotImplemented


_OWN: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.Tensor.requires_grad_: _refuse_training,
    torch.Tensor.requires_grad.__set__: _refuse_training,  # type: ignore[attr-defined]
}
