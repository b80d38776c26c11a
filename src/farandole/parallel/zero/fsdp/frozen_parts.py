"""What frozen weights store, for FSDP2: parameters of modules that are in the model while it is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ...frozen.frozen_weight import FrozenWeight

_NAME = "_farandole_stored_"


@contextmanager
def stored_parts_shown(model: nn.Module) -> Iterator[None]:
    """Let `fully_shard` see the stored tensors of frozen weights as parameters of the layers that have them.

    The names of the model are the old ones afterwards. See [Note: parts in shards] in `parallel.frozen`.
    """
    shown: list[tuple[nn.Module, str]] = []
    seen: set[int] = set()
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, FrozenWeight) and id(weight) not in seen:
                seen.add(id(weight))
                module.add_module(_NAME + name, weight.to_module())
                shown.append((module, _NAME + name))
    try:
        yield
    finally:
        for module, name in shown:
            del module._modules[name]
