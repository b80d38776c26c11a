"""Embeddings and output layers over one vocabulary, split by words."""

from __future__ import annotations

from torch import nn

from ...blocks import repeated_blocks
from ..layers.split_layers import is_linear
from .recipe import LayerPart, TensorRecipe


def add_vocabulary(recipe: TensorRecipe, model: nn.Module) -> None:
    """Add pairs of an embedding and a linear layer of equal vocabulary outside repeated blocks; tied or not."""
    inside = tuple(f"{name}." for name, _ in repeated_blocks(model))
    outside = [
        (name, each) for name, each in model.named_modules() if not f"{name}.".startswith(inside or ("\0",))
    ]
    embeddings = [(name, each) for name, each in outside if isinstance(each, nn.Embedding) and _is_plain(each)]
    outputs = [(name, each) for name, each in outside if isinstance(each, nn.Linear) and is_linear(each)]
    for name, embedding in embeddings:
        for output_name, output in outputs:
            shape = (output.out_features, output.in_features)
            is_tied = output.weight is embedding.weight
            if is_tied or shape == (embedding.num_embeddings, embedding.embedding_dim):
                source = "one vocabulary"
                recipe.add({name: LayerPart("vocabulary", source), output_name: LayerPart("vocabulary", source)})


def _is_plain(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.sparse and not embedding.scale_grad_by_freq
