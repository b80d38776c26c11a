"""Which gradients of a unit each degree divides."""

from __future__ import annotations

from functools import lru_cache

from ..model.profile import ModelUnit


@lru_cache(maxsize=256)
def divided_gradients(unit: ModelUnit) -> tuple[str, ...]:
    """Return of each gradient of a unit which degree divides it: "tensor", "expert" or "".

    Where the profile does not say, experts are known by their names, and of the others the largest are divided
    until they have as many parameters as the recipe says.
    """
    found = [each.divided_by for each in unit.gradients]
    if unit.expert is not None and "expert" not in found:
        found = ["expert" if "expert" in each.name.lower() else how
                 for each, how in zip(unit.gradients, found, strict=True)]  # fmt: skip
    if unit.tensor is not None and "tensor" not in found:
        left = unit.tensor.parameters
        order = sorted(range(len(found)), key=lambda i: -unit.gradients[i].rows * unit.gradients[i].columns)
        for i in order:
            count = unit.gradients[i].rows * unit.gradients[i].columns
            if not found[i] and count <= left:
                found[i], left = "tensor", left - count
    return tuple(found)
