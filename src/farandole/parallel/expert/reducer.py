"""The exchange of gradients where experts are divided: which parameters travel among which ranks.

See [Note: gradients of experts] in `expert_ranks`: what the reducer of experts takes is weighed already.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ...comm.batch_weight import BatchWeight
from ...comm.reducer.options import ReducerOptions
from ...comm.reducer.reducer import GradientReducer
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.spec import Plan
from ..mesh import Mesh
from ..split import split_of

Named = list[tuple[str, nn.Parameter]]


def shared_parameters(named: Named) -> Named:
    """Return the parameters of `named` of which all ranks with other samples have the same part."""
    return [(name, each) for name, each in named if not _is_expert(each)]


def make_expert_reducer(mesh: Mesh, named: Named, plan: Plan, name: str) -> GradientReducer | None:
    """Return the reducer of the experts of this rank among the ranks that have the same ones; to be called by all.

    `named`: the parameters of this rank; `name`: of the model. None where no rank has the same ones.
    Gradients of experts travel as they are, whatever the plan's codec is.
    """
    if mesh.size("expert") == 1 or mesh.size("data", "shard", "context") == 1:
        return None
    part = mesh.part("data", "shard", "context")  # made by all ranks: a stage without experts too
    experts = [(each, parameter) for each, parameter in named if _is_expert(parameter)]
    if not experts:
        return None
    part.session.batch_weight = BatchWeight()
    exact = replace(plan, codec=NONE, codec_for={}, lossy=False)
    return GradientReducer(part, experts, exact, ReducerOptions(model=f"{name}, its experts"))


def _is_expert(parameter: nn.Parameter) -> bool:
    split = split_of(parameter)
    return split is not None and split.degree == "expert"
