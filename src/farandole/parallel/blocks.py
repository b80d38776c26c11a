"""The repeated blocks of a model, such as layers of a transformer: what is recomputed or sharded at once.

One definition for all who ask: recomputation, sharding of parameters, and the estimate of memory.
"""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of `model` with their names, in the order of `named_modules`.

    A block is an entry of an `nn.ModuleList` or `nn.Sequential` that holds parameters and further modules, at the
    outermost place that has at least two such entries: of a ResNet its bottlenecks, of a transformer its layers.
    An entry that is itself a list or a sequence stands for its entries. Without blocks the list is empty.
    """
    found: list[tuple[str, nn.Module]] = []
    _collect(model, "", found)
    return found


def _collect(module: nn.Module, prefix: str, found: list[tuple[str, nn.Module]]) -> None:
    entries = [(name, child) for name, child in module.named_children() if _is_block(child)]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(entries) > 1
    for name, child in entries:
        path = f"{prefix}{name}"
        if is_list and not isinstance(child, (nn.ModuleList, nn.Sequential)):
            if all(child is not other for _, other in found):
                found.append((path, child))
        else:
            _collect(child, f"{path}.", found)


def _is_block(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and next(module.children(), None) is not None
