"""Whether ranks distribute the same models by the same plan, in the same order.

Two models could be alike in class and shapes. Models are seeded alike on all ranks, as a rule. Then two that
change places are known by their first values: this rank's is the one that rank 0 had in another call. Where every
rank draws values of its own, nothing is known.
"""

from __future__ import annotations

import hashlib

from torch import nn

from ...comm.messages.element_bytes import bytes_of
from ...comm.world.store_sync import all_gather_json, require_same
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError, Mismatch
from ...core.vocabulary.rank_lists import name_ranks
from ...core.vocabulary.spec import Plan

_ELEMENTS = 1024
"""Elements of each parameter that are compared."""
_PARAMETERS = 32


class _Digests(list[list[str]]):
    """The digests of the ranks' models, for each call."""


def refuse_other_order(here: World, model: nn.Module) -> None:
    """Raise `Mismatch` when a rank's model is another one of rank 0's; to be called by all, before bytes move."""
    now = all_gather_json(here, "order of models", _digest(model))
    earlier = here.session.keep(_Digests, _Digests)
    for call, then in enumerate(earlier, start=1):
        swapped = [rank for rank in range(here.size) if (now[rank], then[rank]) == (then[0], now[0])]
        if swapped and now[0] != then[0]:
            raise Mismatch(
                f"models {call} and {len(earlier) + 1} were distributed in another order by {name_ranks(swapped)} "
                "than by rank 0",
                rank=here.job_rank,
                operation="comparing models",
                remedy="call farandole.distribute for the same models in the same order on every rank",
            )
    earlier.append(now)


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in list(model.parameters())[:_PARAMETERS]:
        first = parameter.detach().reshape(-1)[:_ELEMENTS].cpu()
        digest.update(bytes_of(first).numpy().data)
    return digest.hexdigest()[:16]


def compare_models(here: World, model: nn.Module, plan: Plan) -> None:
    """Raise `Mismatch`, on every rank, where the ranks' plans or models differ.

    Raises `ConfigError` for tensors that cannot be written to any more.
    """
    require_same(
        here, "comparing plans", [(f"plan key {key!r}", value) for key, value in plan.to_mapping().items()]
    )
    trains = [(f"parameter {name!r}", "trains" if parameter.requires_grad else "frozen")
              for name, parameter in model.named_parameters()]  # fmt: skip
    one = ("parameters that are one under several names", _tied(model))
    made = [name for name, each in [*model.named_parameters(), *model.named_buffers()] if each.is_inference()]
    tensors = ("tensors that were made in torch.inference_mode()", made)
    require_same(here, "comparing models", [("class of the model", class_of(model)), one, tensors, *trains])
    if made:
        raise ConfigError(
            f"distribute: {', '.join(map(repr, made[:3]))} was made in torch.inference_mode(), and cannot take "
            "the values of rank 0",
            remedy="make the model outside of it, or replace the tensor by its clone()",
        )
    refuse_other_order(here, model)


def class_of(model: nn.Module) -> str:
    """Return the name of a model's class, for messages."""
    kind = type(model)
    return kind.__qualname__.rpartition(".")[2]


def _tied(model: nn.Module) -> list[str]:
    """Return, of each parameter that has several names, these."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [" = ".join(several) for several in names.values() if len(several) > 1]
