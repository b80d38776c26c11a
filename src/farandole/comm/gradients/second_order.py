"""Backward passes that are to be differentiated again, where gradients of gradients would be wrong."""

from __future__ import annotations

import torch

from ...core.vocabulary.errors import ConfigError


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
