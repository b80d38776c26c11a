"""FLOPs of calls, by torch's formulas and for what it lacks: attention on the CPU, recurrent layers, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

_ATEN = torch.ops.aten
_PLAIN_NAMESPACES = ("aten", "prims", "prim", "profiler", "c10d", "_c10d_functional")
_FUSED = {
    getattr(_ATEN, f"_scaled_dot_product_{kind}{way}")
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for way in ("", "_backward")
}
"""Attention in one kernel, of (samples, heads, tokens, width)."""
_HEAVY = ("fft", "linalg", "svd", "cholesky", "_thnn", "cudnn_rnn", "miopen_rnn", "cdist", "triangular_solve")
"""Parts of the names of operations that compute much, and for which there is no formula here."""


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float | None:
    """Return the floating-point operations of a call: 2 for a multiplication with an addition.

    0 for elementwise operations and copies; None where there is no formula.
    """
    packet = func.overloadpacket
    if packet in _OWN:
        return _OWN[packet](args, out) * _computed_share(func, args, kwargs)
    formula = flop_counter.flop_registry.get(packet)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out)) * _computed_share(func, args, kwargs)
    name = str(func.name()).partition("::")
    is_known = name[0] in _PLAIN_NAMESPACES and not any(part in name[2] for part in _HEAVY)
    return 0.0 if is_known else None


def is_fused_attention(func: Any) -> bool:
    """Return whether a call is attention in one kernel."""
    return func.overloadpacket in _FUSED


def _computed_share(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return what of all scores a kernel computes: with `is_causal` it leaves out what a token may not see."""
    if not is_fused_attention(func):
        return 1.0
    names = [each.name for each in func._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    queries, keys = named["query"].shape[-2], named["key"].shape[-2]
    if not named.get("is_causal", False) or not queries or not keys:
        return 1.0
    seen = min(queries, keys)
    return float((seen * (seen + 1) / 2 + (queries - seen) * keys) / (queries * keys))


def _attention(args: Sequence[Any], _: Any) -> float:
    query, key, value = args[:3]
    return float(2.0 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _attention_backward(args: Sequence[Any], _: Any) -> float:
    # Scores again, and the gradients of values, of scores, of queries and of keys (Dao et al. 2022, appendix B.4).
    _, query, key, value = args[:4]
    scores = 2.0 * query.shape[:-1].numel() * key.shape[-2]
    return float(scores * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _grouped(args: Sequence[Any], _: Any) -> float:
    """Groups of rows, or of columns, each with a matrix of its own; or two batches of matrices."""
    rows, matrices = args[:2]
    several = rows.shape[0] if rows.dim() == matrices.dim() == 3 else 1
    return float(2.0 * several * rows.shape[-2:].numel() * matrices.shape[-1])


def _recurrent(args: Sequence[Any], _: Any) -> float:
    """One layer and direction: (input, w_ih, w_hh, ...), input (tokens, batch, features)."""
    tokens, inputs, hidden = args[0], args[1], args[2]
    return float(2.0 * tokens.shape[:-1].numel() * (inputs.numel() + hidden.numel()))


def _recurrent_backward(args: Sequence[Any], out: Any) -> float:
    return 2.0 * _recurrent(args, out)


_OWN: dict[Any, Callable[[Sequence[Any], Any], float]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._grouped_mm: _grouped,
    _ATEN.mkldnn_rnn_layer: _recurrent,
    _ATEN.mkldnn_rnn_layer_backward: _recurrent_backward,
}
