"""The operations of a GPU, run on tensors of the CPU: what is counted for GPUs on a machine without one.

[Note: what a GPU runs otherwise] Torch decides by a tensor's device what an operation is made of. On a GPU
attention is one kernel with dropout too, dropout keeps a mask of one byte an element, RMSNorm is one kernel that
keeps its input, and autocast computes more in fp32 (docs.pytorch.org/docs/stable/amp.html). Tensors that pretend
to be on a GPU end the process in a torch without CUDA, so operations of the CPU get a GPU's forms for some time,
in torch's dispatcher. Shapes and types of results are right, values are not: attention leaves its dropout out,
and RMSNorm subtracts a mean.

Not known: what cuDNN keeps of recurrent layers, and workspaces of kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...comm.device.accelerator import GPU, gpu_count

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
_ONE_AT_A_TIME = threading.Lock()
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
    with _ONE_AT_A_TIME:
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
