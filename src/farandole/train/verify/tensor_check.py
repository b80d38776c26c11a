"""The check of split layers: which kinds of units were proven to do what the plain modules do."""

from __future__ import annotations

from torch import nn

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...parallel.tensor.apply_tensor import proofs_of
from .verify import Check


def check_tensor(here: World, model: nn.Module) -> list[Check]:
    """Say how many units of split layers were proven; nothing for a model without any."""
    proofs = proofs_of(model)
    mine = None if proofs is None else [len(proofs.proven), len(proofs.names), len(proofs.waiting)]
    said = [each for each in all_gather_json(here, "verify/tensor", mine) if each is not None]
    if not said:
        return []
    kinds, units, waiting = (max(each[i] for each in said) for i in range(3))
    if waiting:
        return [
            Check("split layers", None, f"{waiting} of {units} units have not run yet, so they are not proven")
        ]
    return [Check("split layers", True, f"{units} units ({kinds} kinds) do what the plain modules do")]
