"""One forward and backward pass, recorded by spans: what is computed, moved, saved, and ready in which order.

Works on fake tensors, and on real ones where a model reads values.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...parallel.context.attention import AttentionCall
from .fake_pass import errors_of_pass, storages_of
from .spans import Marks, PassSpans, fp32_bytes
from .user_code import Loss, forward_loss, passes_of

_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention", "bmm", "matmul")
_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
_LINEAR = (nn.Linear, nn.Embedding)
_OF_LAYERS = inspect.signature(functional.multi_head_attention_forward)


class _Storages:
    """A set of storages, each as long as its memory lives: a later one may have its address."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            self._alive[storage._cdata] = weakref.ref(storage, partial(self._end, storage._cdata))

    def discard(self, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            self._alive.pop(storage._cdata, None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return any(storage._cdata in self._alive for storage in storages_of(tensor))

    def _end(self, key: int, _: Any) -> None:
        self._alive.pop(key, None)


class PassRecorder(TorchDispatchMode):
    """Writes what happens into the current span of `spans`."""

    def __init__(self, model: nn.Module, spans: PassSpans, marks: Marks) -> None:
        super().__init__()
        self.spans, self._marks = spans, marks
        self.ready: list[nn.Parameter] = []
        """Parameters in the order in which their gradients were made."""
        self.first_use: dict[int, int] = {}
        """By id of a parameter: the number of the span that used it first."""
        self.uncounted: set[str] = set()
        """Names of operations without a formula."""
        self.undivided = ""
        """Attention that context parallel refuses; empty: none was seen."""
        self.is_backward = False
        self._parameters = {storages_of(p)[0]._cdata: p for p in model.parameters() if storages_of(p)}
        self._kept = _Storages([*model.parameters(), *model.buffers()])
        self._divided = _Storages()
        self._saved = _Storages()
        self._saved_shapes: list[tuple[int, tuple[int, ...], float]] = []
        self._inside = dict.fromkeys(("layer", "attention", "linear", "region", "expert"), 0)
        self._entered: set[tuple[int, int]] = set()
        self._entries: list[torch.Tensor] = []

    # -- operations --------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and count it."""
        named = kwargs or {}
        out = func(*args, **named)
        flops = flops_of(func, args, named, out)
        if flops is None:
            self.uncounted.add(str(func))
            flops = 0.0
        if self.is_backward:
            node = torch._C._current_autograd_node()
            if node is not None:
                span = self.spans.of_node(node._sequence_nr())
                span.backward_flops += flops
                span.attention.backward_flops += flops if is_fused_attention(func) else 0.0
            return out
        self._count_forward(func, tree_leaves((args, named)), tree_leaves(out), flops)
        return out

    def _count_forward(self, func: Any, inputs: list[Any], outputs: list[Any], flops: float) -> None:
        span = self.spans.current
        inputs = [each for each in inputs if isinstance(each, torch.Tensor)]
        outputs = [each for each in outputs if isinstance(each, torch.Tensor)]
        for each in inputs:
            self._note_use(each)
        span.forward_flops += flops
        if is_fused_attention(func):
            span.attention.flops += flops
        else:
            span.products += flops > 0
        if func.overloadpacket is torch.ops.aten._grouped_mm and inputs[0].dtype == torch.float32:
            span.uncast_flops += flops
        if self._inside["expert"]:
            span.experts.flops += flops
        is_between = self._inside["region"] and not self._inside["linear"] and _is_attention(func)
        if self._inside["layer"] or is_between:
            span.divided.flops += flops
        known = {storage._cdata for each in inputs for storage in storages_of(each)}
        is_view = not func._schema.is_mutable and any(
            storage._cdata in known for each in outputs for storage in storages_of(each)
        )
        if is_view or not outputs:
            return
        if self._inside["attention"] or any(each in self._divided for each in inputs):
            for each in outputs:
                self._divided.add(each)
        if func._schema.name in _EMPTY:
            return
        span.operations += 1
        moved = [*(each for each in inputs if each not in self._kept), *outputs]
        span.moved_bytes += sum(map(fp32_bytes, moved))

    def _note_use(self, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            parameter = self._parameters.get(storage._cdata)
            if parameter is not None:
                self.first_use.setdefault(id(parameter), len(self.spans.all) - 1)

    # -- what backward needs -----------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves: its storage, once."""
        if tensor not in self._kept:
            self._kept_once(tensor)
        return tensor

    def _kept_once(self, tensor: torch.Tensor) -> None:
        if tensor in self._saved:
            return
        self._saved.add(tensor)
        span = self.spans.current
        scale = 4 / tensor.element_size() if tensor.is_floating_point() else 1.0
        nbytes = scale * sum(storage.nbytes() for storage in storages_of(tensor))
        span.saved_bytes += nbytes
        if tensor in self._divided:
            span.divided.saved_bytes += nbytes
        self._saved_shapes.append((len(self.spans.all) - 1, tuple(tensor.shape), nbytes))

    # -- modules -----------------------------------------------------------------------------------

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Follow the marked modules, parameters and attention during a pass."""
        handles: list[Any] = []
        for module in model.modules():
            roles = self._roles(module)
            if roles:
                handles += [
                    module.register_forward_pre_hook(partial(self._enter, roles), with_kwargs=True),
                    module.register_forward_hook(partial(self._leave, roles), always_call=True),
                ]
        handles += [
            each.register_post_accumulate_grad_hook(self.ready.append)
            for each in model.parameters()
            if each.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _roles(self, module: nn.Module) -> list[str]:
        part = self._marks.layers.get(module)
        roles = ["expert"] * (module in self._marks.experts) + ["region"] * (module in self._marks.regions)
        if part is not None:
            roles += ["layer"] + ["attention"] * (part.kind == "attention")
        return roles + ["linear"] * isinstance(module, _LINEAR)

    def _enter(self, roles: list[str], module: nn.Module, arguments: Any, named: Any) -> None:
        for role in roles:
            self._inside[role] += 1
        if "expert" in roles:
            self._count_tokens(module, arguments)
        part = self._marks.layers.get(module)
        if part is None or part.kind == "rows" or isinstance(module, nn.Embedding):
            return
        for each in tree_leaves((arguments, named)):
            if isinstance(each, torch.Tensor) and each.requires_grad and module not in self._marks.gathers:
                key = (len(self.spans.all), id(each))
                if key not in self._entered:
                    self._entered.add(key)
                    self._entries.append(each)  # its id is a key
                    self.spans.current.divided.backward_sums += 1

    def _leave(self, roles: list[str], module: nn.Module, _: Any, output: Any) -> None:
        for role in roles:
            self._inside[role] -= 1
        part = self._marks.layers.get(module)
        tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        if part is None or not tensors:
            return
        divided = self.spans.current.divided
        is_output = part.kind == "vocabulary" and not isinstance(module, nn.Embedding)
        if is_output or (part.kind == "columns" and module not in self._marks.gathers):
            for each in tensors:
                self._divided.add(each)
            return
        for each in tensors:
            self._divided.discard(each)
        if part.kind != "columns":
            divided.forward_sums += 1
            divided.sum_bytes = max(divided.sum_bytes, fp32_bytes(tensors[0]))

    def _count_tokens(self, module: nn.Module, arguments: Any) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        if not tensors:
            return
        # Experts of transformers get each token once, with the numbers of its experts.
        copies = tensors[1].shape[-1] if len(tensors) > 1 and not tensors[1].is_floating_point() else 1
        self.spans.current.experts.token_bytes += copies * fp32_bytes(tensors[0])

    def finish(self) -> None:
        """Add to attention what of the saved bytes grows with its sequence; drop it all if some is undivided."""
        self.undivided = next(
            (each.attention.undivided for each in self.spans.all if each.attention.undivided), ""
        )
        if self.undivided:
            for span in self.spans.all:
                span.attention.heads = 0
        for number, shape, nbytes in self._saved_shapes:
            attention = self.spans.all[number].attention
            if attention.sequence > 1 and any(size % attention.sequence == 0 for size in shape if size):
                attention.saved_bytes += nbytes


class _AttentionWatch(TorchFunctionMode):
    """Sees the calls of attention with their queries, keys and values.

    torch shows `multi_head_attention_forward` of `nn.MultiheadAttention` and what has it inside (such as
    `nn.TransformerEncoderLayer`) as one call: the call inside of it is not shown.
    """

    def __init__(self, spans: PassSpans) -> None:
        super().__init__()
        self._spans = spans

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self._count(AttentionCall(*args, **named))
        elif func is functional.multi_head_attention_forward:
            self._count_layer(_OF_LAYERS.bind(*args, **named).arguments)
        return func(*args, **named)

    def _count(self, call: AttentionCall) -> None:
        query, key, value = call.query, call.key, call.value
        if query.dim() < 3:
            return
        seen = self._spans.current.attention
        seen.heads = math.gcd(seen.heads, query.shape[-3])
        seen.key_value_heads = math.gcd(seen.key_value_heads, key.shape[-3])
        seen.query_bytes += fp32_bytes(query)
        seen.key_value_bytes += fp32_bytes(key) + fp32_bytes(value)
        seen.sequence = max(seen.sequence, query.shape[-2])
        seen.has_dropout |= call.dropout_p > 0.0

    def _count_layer(self, named: Mapping[str, Any]) -> None:
        """Count attention of (tokens, samples, width): its keys and values get the width of the queries."""
        seen, query, key = self._spans.current.attention, named["query"], named["key"]
        if named.get("need_weights", True):
            seen.undivided = "need_weights = True of nn.MultiheadAttention"
        elif key.shape[0] != query.shape[0]:
            seen.undivided = "attention of nn.MultiheadAttention to another sequence"
        seen.heads = math.gcd(seen.heads, named["num_heads"])
        seen.key_value_heads = math.gcd(seen.key_value_heads, named["num_heads"])
        seen.query_bytes += fp32_bytes(query)
        seen.key_value_bytes += 2 * fp32_bytes(query) * key.shape[0] / query.shape[0]
        seen.sequence = max(seen.sequence, query.shape[0])
        seen.has_dropout |= named.get("training", True) and named["dropout_p"] > 0.0


def record(model: nn.Module, batch: Any, loss: Loss | None, marks: Marks, *, device: str) -> PassRecorder:
    """Run `model` forward and backward on `batch` and return what was recorded; its gradients are dropped.

    Raises what the model raises, and `ConfigError` if there is no scalar to go backward from.
    """
    spans = PassSpans(model)
    recorder = PassRecorder(model, spans, marks)
    with recorder.hooks(model), spans.watching(), recorder, _AttentionWatch(spans):
        with (
            errors_of_pass(passes_of(loss)),
            saved_tensors_hooks(recorder.pack, lambda tensor: tensor),
        ):
            scalar = forward_loss(model, batch, loss, device=device, precision="fp32")
        recorder.is_backward = True
        with errors_of_pass("the backward pass"):
            scalar.backward()
    recorder.finish()
    model.zero_grad(set_to_none=True)
    return recorder


def _is_attention(func: Any) -> bool:
    name = str(func._schema.name)
    return any(part in name for part in _ATTENTION)


# FLOPs of calls, by torch's formulas and for what it lacks: attention on the CPU, recurrent layers, experts.


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
