"""Models of Hugging Face's transformers, whose forward passes make positions and masks by themselves.

[Note: positions and masks] Positions are given as those of this rank's tokens. A mask of ones is given instead of
the one for padding, so that the model asks for plain or causal attention and makes no mask of this rank's tokens
alone; nor does it take the jump between this rank's two runs of tokens for two packed sequences. Padding goes to
attention by itself. Known by its configuration; transformers is not imported here.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.vocabulary.errors import ConfigError
from .group import ContextGroup, positions_of


class Inputs(NamedTuple):
    """What a forward pass is given."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    padding: torch.Tensor | None = None
    """(batch, tokens), False where a token is padding; None: no token is."""


def is_from_transformers(model: nn.Module) -> bool:
    """Return whether `model` is one of transformers' models."""
    return hasattr(getattr(model, "config", None), "_attn_implementation")


def require_right_kind(model: nn.Module) -> None:
    """Raise `ConfigError` for a model of transformers whose attention is not torch's function."""
    kind = model.config._attn_implementation if is_from_transformers(model) else "sdpa"  # type: ignore[union-attr]
    if kind != "sdpa":
        raise ConfigError(
            f'context: this {type(model).__name__} has attn_implementation="{kind}", which does not go through '
            "scaled_dot_product_attention",
            remedy='make the model with attn_implementation="sdpa"',
        )


def prepare(model: nn.Module, inputs: Inputs, group: ContextGroup | None) -> Inputs:
    """Return what the model is given for this rank's tokens; without a group, for whole sequences.

    See [Note: positions and masks]. Raises `ConfigError` for what cannot be divided.
    """
    if not is_from_transformers(model):
        return inputs
    names = inspect.signature(model.forward).parameters
    given = dict(zip(names, inputs.arguments, strict=False)) | inputs.named
    tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        return inputs
    batch, length = tokens.shape[:2]
    mask, padding = given.get("attention_mask"), None
    if "attention_mask" in names and (
        mask is None or (isinstance(mask, torch.Tensor) and mask.shape == (batch, length))
    ):
        ones = torch.ones(batch, length, dtype=torch.bool, device=tokens.device)
        if group is None:
            given["attention_mask"] = ones if mask is None else mask
        else:
            given["attention_mask"] = ones
            padding = None if mask is None else mask != 0  # on all ranks or none: they tell each other
    if group is not None:
        _refuse(model, given, length * group.size)
        if "position_ids" in names and given.get("position_ids") is None:
            given["position_ids"] = positions_of(length * group.size, group.rank, group.size, tokens.device)[None]
    return Inputs((), given, padding)


def _refuse(model: nn.Module, given: dict[str, Any], whole: int) -> None:
    config: Any = model.config
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and getattr(config, f"use_{name}", True) and whole >= window:
            raise ConfigError(
                f"context: this {type(model).__name__} attends within {name} = {window} tokens, and sequences "
                f"have {whole}: such masks are not divided yet",
                remedy=f"set config.{name} = None for full attention, or context = 1",
            )
    if given.get("labels") is not None and given.get("shift_labels") is None and _shifts(model):
        raise ConfigError(
            f"context: this {type(model).__name__} shifts labels by one token, within the tokens of this rank",
            remedy="shift whole sequences before they are cut, as "
            "shift_labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100), and give the model "
            "labels= and shift_labels=, both from fd.context_shard",
        )
    positions = given.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.dim() > 1 and positions.shape[-1] % 2 == 0:
        runs = positions.unflatten(-1, (2, -1))
        if bool((runs.diff(dim=-1) != 1).any()):
            raise ConfigError(
                "context: position_ids do not go up by 1, as of several sequences packed into one, whose masks "
                "are not divided yet",
                remedy="give each sequence a row of its own, padded, or set context = 1",
            )


def _shifts(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
