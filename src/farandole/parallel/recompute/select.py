"""Which modules of a model are recomputed: its repeated blocks, or those whose names match patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.suggestions import did_you_mean
from ..blocks import repeated_blocks
from ..changed_class import require_changeable

_NAMES = 12
"""Names that an error lists at most."""


def modules_to_recompute(
    model: nn.Module, recompute: Literal["none", "blocks"] | tuple[str, ...]
) -> list[tuple[str, nn.Module]]:
    """Return the modules that the plan key names, outermost ones only, in the order of `named_modules`.

    Raises `PlanError` when ``"blocks"`` finds none, or a pattern matches no module that has a forward pass;
    `ConfigError` for a module whose forward pass cannot be changed.
    """
    if recompute == "none":
        return []
    chosen = _blocks(model) if recompute == "blocks" else _matching(model, recompute)
    for name, module in chosen:
        require_changeable(module, f"plan: recompute, module {name!r}")
    return chosen


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = repeated_blocks(model)
    if not found:
        raise PlanError(
            f'plan: recompute = "blocks", but this {type(model).__name__} has no list of repeated blocks',
            remedy='name modules by patterns: recompute = ["encoder.*"]',
        )
    return found


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    callable_modules = {name: module for name, module in model.named_modules() if name and _has_forward(module)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in callable_modules):
            raise PlanError(
                f"plan: recompute: the pattern {pattern!r} matches no module with a forward pass",
                remedy=_remedy(pattern, list(callable_modules)),
            )
    chosen: list[tuple[str, nn.Module]] = []
    for name, module in callable_modules.items():
        is_inside = any(module is not outer and module in set(outer.modules()) for _, outer in chosen)
        if not is_inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append((name, module))
    return chosen


def _has_forward(module: nn.Module) -> bool:
    """Return whether the module can be called; an `nn.ModuleList` cannot."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _remedy(pattern: str, names: list[str]) -> str:
    inside = f"{pattern}.*"
    if any(fnmatchcase(name, inside) for name in names):
        return f"did you mean {inside!r}?"
    text = did_you_mean(pattern, names)
    return text if text.startswith("did") else f"modules: {', '.join(names[:_NAMES])}"
