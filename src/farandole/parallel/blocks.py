"""The repeated blocks of a model, such as layers of a transformer: what is recomputed or sharded at once.

One definition for all who ask: recomputation, sharding of parameters, and the estimate of memory.
"""

from __future__ import annotations

from collections import Counter

from torch import nn


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of `model` with their names, in the order of `named_modules`.

    A block is an entry of an `nn.ModuleList` or `nn.Sequential` that holds parameters and further modules, at the
    outermost place that has at least two such entries: of a ResNet its bottlenecks, of a transformer its layers.
    An entry that is itself a list or a sequence stands for its entries. But an `nn.Sequential` of single layers is
    a block where an `nn.ModuleList` has several with the same kinds of layers. Without blocks the list is empty.
    """
    found: dict[nn.Module, str] = {}
    for name, block in _blocks_in(model, ""):
        found.setdefault(block, name)
    return [(name, block) for block, name in found.items()]


def _blocks_in(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    entries = [(name, child) for name, child in module.named_children() if _is_block(child)]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(entries) > 1
    stacks = [child for _, child in entries if isinstance(child, nn.Sequential)]
    alike = Counter(map(_layers, stacks if isinstance(module, nn.ModuleList) else ()))
    found: list[tuple[str, nn.Module]] = []
    for name, child in entries:
        path = f"{prefix}{name}"
        inside = [(path, child)]
        if not is_list or isinstance(child, (nn.ModuleList, nn.Sequential)):
            inside = _blocks_in(child, f"{path}.") or (inside if alike[_layers(child)] > 1 else [])
        found += inside
    return found


def _layers(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return what `module` holds, by names: those of classes stay where a plan changes classes in place."""
    return tuple((name, type(each).__name__) for name, each in module.named_modules() if name)


def _is_block(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and next(module.children(), None) is not None
