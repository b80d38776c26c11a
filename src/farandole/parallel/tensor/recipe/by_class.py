"""Recipes of modules that are known by their class: torch's transformer layers, and transformers' models.

transformers says itself how its models are split: ``_tp_plan``, by patterns in which ``*`` is a number. What
a style of it means here is one table. transformers is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...changed_class import is_transposed, plain_class_of
from ..layers.split_layers import is_linear
from .recipe import LayerPart, TensorRecipe

_STYLES = {
    "colwise": LayerPart("columns", "transformers"),
    "packed_colwise": LayerPart("columns", "transformers", packed=2),
    "colwise_gather_output": LayerPart("vocabulary", "transformers"),
    "colwise_rep": LayerPart("vocabulary", "transformers"),
    "rowwise": LayerPart("rows", "transformers"),
    "rowwise_split_input": LayerPart("rows", "transformers"),
    "embedding_rowwise": LayerPart("vocabulary", "transformers"),
}  # fmt: skip
_NOTHING_TO_SPLIT = ("replicated_with_grad_allreduce", "replicate", "sequence_parallel")
"""Styles of layers that stay whole: whether their gradient is a sum is found out by the proof."""
_GPT2 = {
    "attn": {"c_attn": LayerPart("columns", "GPT-2", packed=3), "c_proj": LayerPart("rows", "GPT-2")},
    "mlp": {"c_fc": LayerPart("columns", "GPT-2"), "c_proj": LayerPart("rows", "GPT-2")},
}


def add_torch_layers(recipe: TensorRecipe, model: nn.Module) -> None:
    """Add torch's attention, and the two linear layers of its transformer layers."""
    for name, module in model.named_modules():
        kind = plain_class_of(module)
        if isinstance(module, nn.MultiheadAttention) and kind.forward is nn.MultiheadAttention.forward:
            recipe.add({name: LayerPart("attention", "torch.nn.MultiheadAttention")})
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)) and _has_own_forward(kind):
            prefix, source = f"{name}." if name else "", f"torch.nn.{kind.__name__}"
            recipe.add(
                {f"{prefix}linear1": LayerPart("columns", source), f"{prefix}linear2": LayerPart("rows", source)}
            )


def _has_own_forward(kind: type[nn.Module]) -> bool:
    return any(
        issubclass(kind, each) and kind._ff_block is each._ff_block and kind.forward is each.forward
        for each in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )


def add_transformers(recipe: TensorRecipe, model: nn.Module) -> list[str]:
    """Add what transformers says of its own models; return the styles that are not known here, with a name each.

    Layers of one parent belong together: if one has an unknown style, none of them is split.
    """
    unknown: dict[str, str] = {}
    for prefix, module in model.named_modules():
        groups: dict[str, dict[str, LayerPart | None]] = {}
        for path, style in _styles(module):
            name = f"{prefix}.{path}" if prefix else path
            parent = name.rpartition(".")[0]
            layer = model.get_submodule(name)
            if style in _NOTHING_TO_SPLIT:
                continue
            fits = is_linear(layer) or isinstance(layer, nn.Embedding)
            part = _STYLES.get(style) if fits else None
            groups.setdefault(parent, {})[name] = part
            if part is None:
                unknown.setdefault(style, name)
        for group in groups.values():
            known = {name: part for name, part in group.items() if part is not None}
            if len(known) == len(group):
                recipe.add(known)
        if plain_class_of(module).__name__ in ("GPT2Block", "DecisionTransformerGPT2Block"):
            _add_gpt2(recipe, prefix, module)
    return [f"{name} ({style})" for style, name in unknown.items()]


def _styles(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the paths of layers below `module` and their styles, by the plan of its class or configuration."""
    own = vars(module).get("_tp_plan") or getattr(type(module), "_tp_plan", None)
    of_base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if not hasattr(module, "base_model_prefix"):
        return
    plan: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    base = getattr(module, str(module.base_model_prefix), None)
    if isinstance(of_base, dict) and (base is None or base is module):
        plan.update(of_base)
    if not plan:
        return
    patterns = [(re.compile(re.escape(pattern).replace(r"\*", r"\d+")), style) for pattern, style in plan.items()]
    for path, _ in module.named_modules():
        for pattern, style in patterns:
            if path and pattern.fullmatch(path):
                yield path, str(style)


def _add_gpt2(recipe: TensorRecipe, prefix: str, block: nn.Module) -> None:
    for part, layers in _GPT2.items():
        found = {f"{prefix}.{part}.{name}": each for name, each in layers.items()}
        parent = getattr(block, part, None)
        if isinstance(parent, nn.Module) and all(
            is_transposed(getattr(parent, name, nn.Identity())) for name in layers
        ):
            recipe.add(found)
