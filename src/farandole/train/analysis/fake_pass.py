"""One forward and backward pass of a model on fake tensors: its operations run without memory, and are counted.

Fake tensors are tensors of the meta device that say they are on another one. On the meta device itself some
operations are others than in a training: attention is computed by the formula there, with its whole matrix of
scores, and dropout keeps another mask.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...comm.device.accelerator import GPU, gpu_count
from ...plan.memory import ActivationFacts, Moment
from .user_code import Loss, describe, errors_of_user, forward_loss, passes_of

# How much memory of tensors is alive, now and at most: each storage is counted from its creation to its end.

_DEVICE_OF = torch.ops.prim.device.default


class LiveStorages(TorchDispatchMode):
    """Counts storages that operations return while the mode is on; views and results in place count once.

    Storages are identified by Python objects that live as long as their memory. Works on fake tensors too, whose
    storages have a size and no memory. What a kernel allocates and frees inside is not seen.
    """

    def __init__(self, ignored: Iterable[torch.Tensor], copied: Iterable[torch.Tensor] = ()) -> None:
        """Never count the storages of `ignored`; count conversions of `copied` also in `copy_bytes`."""
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.copy_bytes = 0
        """Bytes of `live_bytes` that are tensors of `copied` in another type."""
        self.history: list[tuple[int, int]] = []
        """`live_bytes` and `copy_bytes` after each storage that was made."""
        self._ignored = {storage._cdata for tensor in ignored for storage in storages_of(tensor)}
        self._copied = {storage._cdata for tensor in copied for storage in storages_of(tensor)}
        self._live: dict[int, _Counted] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and count what it returns."""
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):  # autograd asks twice an operation
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and any(
            storage._cdata in self._copied for storage in storages_of(args[0])
        )
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor, is_copy=is_copy)
        return result

    def count(self, tensor: torch.Tensor, *, is_copy: bool = False) -> None:
        """Count the storage of `tensor` until its end."""
        for storage in storages_of(tensor):
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._ignored or key in self._live:
                continue
            copy_bytes = nbytes * is_copy
            self.live_bytes += nbytes
            self.copy_bytes += copy_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.history.append((self.live_bytes, self.copy_bytes))
            self._live[key] = _Counted(weakref.ref(storage, partial(self._end, key)), nbytes, copy_bytes)

    def stop_counting(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` no longer, although it is alive."""
        for storage in storages_of(tensor):
            if storage._cdata in self._live:
                self._end(storage._cdata)

    def _end(self, key: int, _: Any = None) -> None:
        counted = self._live.pop(key)
        self.live_bytes -= counted.nbytes
        self.copy_bytes -= counted.copy_bytes


class _Counted(NamedTuple):
    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    copy_bytes: int


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a dense tensor or one in coordinates; of others none."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_ONE_AT_A_TIME = threading.RLock()
_NO_VALUES = re.compile(
    r"is not supported for tensor subclasses|\bmeta (tensors?|device)\b|no fake impl registered", re.IGNORECASE
)
"""What torch says of `.numpy()` and `.tolist()` of a fake tensor, of values of a tensor on the meta device, and of
a user's operation that says nothing of the shapes of its results."""


def needs_values(error: BaseException) -> bool:
    """Whether code failed because it reads values of tensors, which are not there, or would have to."""
    return isinstance(error, _NEEDS_VALUES) or _NO_VALUES.search(str(error)) is not None


@contextlib.contextmanager
def fake_mode() -> Iterator[None]:
    """Make tensors without memory inside. Real tensors that operations meet become fake."""
    with grouped_products(), _positions_in_order(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextlib.contextmanager
def _positions_in_order() -> Iterator[None]:
    """Tell transformers that positions which a model counts itself are those of one sequence a sample.

    It reads their values for that, and where it cannot, attention gets a mask and no `is_causal`. Positions of one
    row for all samples are taken for such; those that a batch brings have rows of their own.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with _ONE_AT_A_TIME:
        usual = masks.find_packed_sequence_indices

        def find(position_ids: torch.Tensor) -> torch.Tensor | None:
            row = position_ids._base if isinstance(position_ids, FakeTensor) else None
            return None if row is not None and row.dim() == 1 else usual(position_ids)

        masks.find_packed_sequence_indices = find
        try:
            yield
        finally:
            masks.find_packed_sequence_indices = usual


@contextlib.contextmanager
def grouped_products() -> Iterator[None]:
    """Let fake tensors of any type be multiplied by groups; see `_grouped_products`."""
    shapes = torch.library.Library("aten", "IMPL")
    try:
        shapes.impl("_grouped_mm", _grouped_products, "Meta", allow_override=True)
        yield
    finally:
        shapes._destroy()


def _grouped_products(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what `torch._grouped_mm` does, as of experts, of any type: torch itself fakes it in bf16 alone."""
    size = [rows.shape[-2], matrices.shape[-1]]
    if rows.dim() == matrices.dim() == 3:
        size = [rows.shape[0], *size]
    elif rows.dim() == matrices.dim() and ends is not None:
        size = [ends.shape[0], *size]
    return rows.new_empty(size, dtype=dtype)


def make_fake(model: nn.Module, device: str, dtype: torch.dtype | None) -> None:
    """Replace the tensors of `model` by fake ones on `device`, in a fake mode that is on.

    Parameters and buffers, and tensors that are plain attributes of modules. Those of floating point get `dtype`;
    None: their own.
    """
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items()})
        for name, value in list(vars(module).items()):
            if name[:1] != "_" and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                vars(module)[name] = tree_map(fake, value)


class LargerBatch(NamedTuple):
    """A batch beside another one: what differs between their passes grows with the batch."""

    batch: Any
    times: int
    """How many times as large it is."""
    problems: list[str]
    """Gets what its pass raises: then nothing is told apart."""


_Height = tuple[int, int]
"""Bytes that are alive, and those of them that do not grow with the batch."""


def run_pass(
    model: nn.Module, batch: Any, loss: Loss | None, *, device: str, precision: str,
    larger: LargerBatch | None = None,
) -> ActivationFacts:  # fmt: skip
    """Return the memory of one forward and backward pass, in a fake mode that is on.

    A gradient counts until it is accumulated: then it lies in a bucket, among gradients. Arguments are those of
    `user_code.forward_loss`. Without a `larger` batch what does not grow are the weights that autocast converts.
    Raises `ConfigError` with the user's file and line for what the model raises, but errors of `needs_values` as
    they are.
    """
    saved, history = _heights(model, batch, loss, device, precision)
    if larger is not None:
        try:
            more, others = _heights(model, larger.batch, loss, device, precision)
        except Exception as error:  # such as where two dimensions count the samples
            larger.problems.append(describe(error))
            more, others = saved, []
        if len(others) == len(history):  # the same operations
            saved = _told_apart(saved, more, larger.times)
            history = [_told_apart(one, two, larger.times) for one, two in zip(history, others, strict=True)]
    moments = tuple(Moment(fixed, alive - fixed) for alive, fixed in (max(history, key=of) for of in _HIGHEST))
    return ActivationFacts(*saved, moments[0].total_bytes, moments)


def _with_times(times: int) -> Callable[[_Height], _Height]:
    return lambda at: (at[1] + times * (at[0] - at[1]), at[0])


_HIGHEST: tuple[Callable[[_Height], _Height], ...] = (
    _with_times(1), lambda at: (at[1], at[0]), lambda at: (at[0] - at[1], at[0]), _with_times(4), _with_times(16),
)  # fmt: skip
"""Where most is alive: in all, of what does not grow, of what grows, and in all with larger batches."""


def _told_apart(one: _Height, two: _Height, times: int) -> _Height:
    alive = one[0]
    grown = round((two[0] - alive) / (times - 1))
    return alive, max(one[1], alive - min(alive, max(0, grown)))


def _heights(
    model: nn.Module, batch: Any, loss: Loss | None, device: str, precision: str
) -> tuple[_Height, list[_Height]]:
    """Return what is alive at the end of the forward pass, and after each storage that was made."""
    parameters = list(model.parameters())
    live = LiveStorages([*parameters, *model.buffers()], copied=parameters)
    trainable = [each for each in parameters if each.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(partial(_stop_counting, live)) for each in trainable]
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor):
            live.count(tensor)
    try:
        with live, silent_logger():
            with errors_of_pass(passes_of(loss)):
                scalar = forward_loss(model, batch, loss, device=device, precision=precision)
            saved = live.live_bytes, live.copy_bytes
            with errors_of_pass("the backward pass"):
                scalar.backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return saved, live.history


def _stop_counting(live: LiveStorages, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "the hook runs after a gradient was accumulated"
    live.stop_counting(parameter.grad)


@contextlib.contextmanager
def silent_logger() -> Iterator[None]:
    """Keep torch from logging what it also raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def errors_of_pass(doing: str) -> Iterator[None]:
    """As `errors_of_user`, but errors of `needs_values` come as they are."""
    kept: BaseException | None = None
    with errors_of_user(doing):
        try:
            yield
        except Exception as error:
            if not needs_values(error):
                raise
            kept = error
    if kept is not None:
        raise kept


# The operations of a GPU, run on tensors of the CPU: what is counted for GPUs on a machine without one.
#
# [Note: what a GPU runs otherwise] Torch decides by a tensor's device what an operation is made of. On a GPU
# attention is one kernel with dropout too, dropout keeps a mask of one byte an element, RMSNorm is one kernel that
# keeps its input, and autocast computes more in fp32 (docs.pytorch.org/docs/stable/amp.html). Tensors that pretend
# to be on a GPU end the process in a torch without CUDA, so operations of the CPU get a GPU's forms for some time,
# in torch's dispatcher. Shapes and types of results are right, values are not: attention leaves its dropout out,
# and RMSNorm subtracts a mean.
#
# Not known: what cuDNN keeps of recurrent layers, and workspaces of kernels.


ASKED_FOR_FP32 = (
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm",
    "log_softmax.int", "softmax.int", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Operations with a dtype, which is float32 where none is given: their input is not copied."""
IN_FP32 = (
    *ASKED_FOR_FP32, "acos", "asin", "cosh", "cosine_similarity", "dist", "erfinv", "exp", "expm1",
    "frobenius_norm.dim", "group_norm", "layer_norm", "log", "log10", "log1p", "log2", "logsumexp",
    "native_layer_norm", "norm.Scalar", "norm.ScalarOpt_dim", "nuclear_norm", "nuclear_norm.dim", "pdist",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "renorm", "rms_norm", "rsqrt", "sinh",
    "softplus", "tan", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
)  # fmt: skip
"""What autocast computes in fp32 on a GPU, and on a CPU in the type of its input."""
_ATEN = torch.ops.aten
_DROPOUT_AT = 4
"""Where attention has dropout_p among its arguments."""
_DIMENSIONS = 4
"""A kernel of attention takes samples, heads, tokens and width. Other shapes are products on a GPU too."""
_AUTOCAST = torch._C.DispatchKey.AutocastCPU
_ONE_MACHINE_AT_A_TIME = threading.Lock()
_INSIDE: set[int] = set()
"""The thread whose operations have the forms of a GPU."""


def counted_on(device: str) -> str:
    """Return where passes run that count operations of `device`: there, or on the CPU of a machine without one."""
    return device if device == "cpu" or gpu_count() else "cpu"


@contextmanager
def operations_of(device: str) -> Iterator[None]:
    """Give operations of this thread the forms they have on `device`, "cpu" or "cuda"; see the note above."""
    here = threading.get_ident()
    if device != GPU or counted_on(device) == device or here in _INSIDE:
        yield
        return
    with _ONE_MACHINE_AT_A_TIME:
        kernels = torch.library.Library("aten", "IMPL")
        _INSIDE.add(here)
        try:
            for name, form in _FORMS.items():
                kernel = partial(_here_only, here, form, _overload(name))
                kernels.impl(name, kernel, "AutogradCPU", allow_override=True)
            for name in IN_FP32:
                kernel = partial(_in_fp32, here, _overload(name))
                kernels.impl(name, kernel, _AUTOCAST.name, with_keyset=True, allow_override=True)
            yield
        finally:
            kernels._destroy()
            _INSIDE.discard(here)


def _here_only(thread: int, form: Callable[..., Any], usual: Any, *args: Any, **named: Any) -> Any:
    if threading.get_ident() != thread:
        return usual.decompose(*args, **named)
    return form(*args, **named)


def _attention(*args: Any, **named: Any) -> Any:
    """Leave dropout out: a CPU's kernel takes none, and saves without it what a GPU's does with it."""
    if args[0].dim() == _DIMENSIONS:
        named.pop("dropout_p", None)
        args = tuple(0.0 if number == _DROPOUT_AT else each for number, each in enumerate(args))
    return _ATEN.scaled_dot_product_attention.default.decompose(*args, **named)


def _dropout(x: torch.Tensor, p: float, train: bool) -> Any:
    if not train or p in (0.0, 1.0) or not x.numel():
        return _ATEN.dropout.default.decompose(x, p, train)
    return torch.native_dropout(x, p, True)[0]


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """Keep what the fused kernel keeps, input and a number for each row: a LayerNorm without bias does."""
    if weight is not None and weight.dtype != x.dtype:  # as on a GPU
        return _ATEN.rms_norm.default.decompose(x, shape, weight, eps)
    return torch.native_layer_norm(x, shape, weight, None, torch.finfo(x.dtype).eps if eps is None else eps)[0]


_FORMS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention, "dropout": _dropout, "rms_norm": _rms_norm,
}  # fmt: skip


def _in_fp32(thread: int, operation: Any, keys: Any, *args: Any, **named: Any) -> Any:
    """Run `operation` as autocast does on a GPU; with a type that is asked for as it is."""
    given = (*args, *named.values())
    if threading.get_ident() != thread:
        return operation.redispatch(keys.remove(_AUTOCAST), *args, **named)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        if any(isinstance(each, torch.dtype) for each in given) or not any(map(_is_short, given)):
            return operation(*args, **named)
        if operation in _ASKED:
            plain = args[:-1] if len(args) > 1 and args[-1] is None else args
            return operation(*plain, **{**named, "dtype": torch.float32})
        return operation(*map(_cast, args), **{name: _cast(each) for name, each in named.items()})


def _cast(value: Any) -> Any:
    return value.float() if _is_short(value) else value


def _is_short(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")


_ASKED = {_overload(name) for name in ASKED_FOR_FP32}
