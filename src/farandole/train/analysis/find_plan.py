"""`fd.find_plan`: which plan is best for a model on a cluster, before anything trains.

::

    answer = fd.find_plan(make_model, make_batch, cluster="dgx-a100", ranks=64, global_batch=512)
    print(answer.plan.to_toml())

and on the ranks ``fd.distribute(model, optimizer, answer.plan)``.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...comm.device.accelerator import gpu_count
from ...core.cluster import Cluster, with_ranks
from ...core.cluster_presets import find_machines
from ...core.vocabulary.config import convert
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import did_you_mean
from ...plan.answer import write_answer, write_inputs
from ...plan.profile import ModelProfile, read_profile
from ...plan.search.decide import Measured, search, to_try, with_trials
from ...plan.search.result import Goal, PlanAnswer, SearchRequest
from .analyse import analyse
from .find_micro_batch import text_of
from .measure import Timing, measure_units
from .trials import PlanTrial, TrialsRequest, run_trials
from .user_code import Batches, load_function


# How a model is timed on this machine, so that it is timed as a rank of a cluster will run it.
def as_a_rank_of(cluster: Cluster) -> dict[str, Any]:
    """Return the device, the threads and the neighbours of a rank, as `Timing` takes them.

    Raises:
        ConfigError: ranks of the cluster compute on GPUs, and this machine has none.
    """
    if not cluster.on_cpus:
        refuse_without_gpu(cluster, "measure")
        return {"device": cluster.operations}
    threads = cluster.fingerprint.get("threads", "")
    return {
        "device": cluster.operations,
        "threads": max(1, int(threads)) if threads.isdecimal() else None,
        "neighbours": cluster.tiers[0].ranks - 1 if cluster.tiers else 0,
    }


def refuse_without_gpu(cluster: Cluster, what: str) -> None:
    """Raise `ConfigError` where `what` would time CPUs of this machine instead of the cluster's GPUs."""
    if not cluster.on_cpus and not gpu_count():
        raise ConfigError(
            f"{what}: ranks of the cluster compute on {cluster.device.name}, and this machine has no GPU",
            remedy=f"run it on a machine of the cluster, or leave {what} out",
        )


Function = Callable[..., Any] | str
"""A function, or its name as ``module:function``."""
_NO_LOSS = (
    "no loss was given (loss=..., plan --loss): the model's own .loss, or the sum of its outputs, stands for it"
)


@dataclass(frozen=True)
class PlanOptions:
    """What `find_plan` takes by name, beside the model, the cluster and the ranks."""

    goal: Goal = "throughput"
    """"throughput", "memory", "cost" or "time"; see docs/plan/planner.md."""
    global_batch: int | None = None
    """Samples of a step, over all ranks; None: the example batch on each rank."""
    loss: Function | None = None
    optimizer: str = "adamw"
    fix: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the plan that are given, with their values."""
    allow_lossy: bool = False
    memory_bytes: int | None = None
    """What a rank may use; None: what the cluster says."""
    precisions: Sequence[str] | None = None
    """What may be chosen of "fp32", "bf16", "fp16" and "bf16-weights"; None: "fp32"."""
    trials: int = 0
    """How many of the best plans are run for some steps."""
    trial_seconds: float = 120.0
    """Limit of one trial."""
    hosts: str = ""
    """Where trials run, as ``farandole run -H``; empty: here."""
    measure: bool = False
    """Whether the model's units are timed on this machine."""
    effort: int = SearchRequest.effort
    out: str | Path | None = None
    """Plan file to write, with its reasons, the profile and the cluster beside it."""


def find_plan(
    make_model: Function | None,
    make_batch: Function | None,
    *,
    cluster: Cluster | str | Path,
    ranks: int,
    profile: ModelProfile | str | Path | None = None,
    **options: Any,
) -> PlanAnswer:
    """Find the best plan of a model on a cluster. Nothing of the model is allocated; call it in one process.

    Args:
        make_model: returns the model, any `nn.Module`; or its name. None: `profile` has the model.
        make_batch: from the number of samples to a batch, or without arguments; as `find_micro_batch` takes it.
        cluster: a file of ``farandole measure``, the name of a preset such as "dgx-a100", or a `Cluster`.
        ranks: how many ranks there are.
        profile: a model that was analysed before, or its file.
        options: the fields of `PlanOptions`, by name.

    Returns:
        The answer: `plan` for `fd.distribute`, and the reasons. A model that fits nowhere is an answer without a
        plan, whose `advice` says by how much and what would make it fit.

    Raises:
        ConfigError: the model, the cluster or an option cannot be used.
        PlanError: there is no plan at all, with the reasons; or `fix` names no key of a plan.
    """
    chosen = _chosen(options)
    functions = {"model": make_model, "batch": make_batch, "loss": chosen.loss}
    if chosen.trials and (make_model is None or make_batch is None):
        raise ConfigError(
            "trials run the model, and a profile alone is none", remedy="give the functions of model and batch too"
        )
    _refuse_without_effect(functions, chosen, has_profile=profile is not None)
    found = cluster if isinstance(cluster, Cluster) else find_machines(str(cluster), ranks)
    if chosen.trials and not chosen.hosts:
        refuse_without_gpu(found, "trials")
    fixed = _fixed(chosen.fix)
    known = _profile(profile, functions, chosen, with_ranks(found, ranks), fixed.get("tensor_recipe"))
    if known.tensor_recipe:
        fixed["tensor_recipe"] = known.tensor_recipe
    request = SearchRequest(
        ranks=ranks,
        global_batch=known.samples * ranks if chosen.global_batch is None else chosen.global_batch,
        goal=chosen.goal,
        fixed=fixed,
        allow_lossy=chosen.allow_lossy,
        memory_bytes=chosen.memory_bytes,
        precisions=SearchRequest.precisions if chosen.precisions is None else tuple(chosen.precisions),
        effort=chosen.effort,
    )
    answer = search(known, found, request)
    if chosen.trials and answer.best is not None:
        answer = _tried(answer, known, found, functions, chosen)
    if chosen.out is not None:
        write_answer(answer, Path(chosen.out))
        write_inputs(known, found, Path(chosen.out))
    return answer


def _chosen(options: Mapping[str, Any]) -> PlanOptions:
    names = [each.name for each in fields(PlanOptions)]
    for name in options:
        if name not in names:
            raise ConfigError(f"find_plan: {name} is not known", remedy=did_you_mean(name, names))
    chosen = PlanOptions(**options)
    if chosen.trials < 0:
        raise ConfigError(f"find_plan: trials = {chosen.trials}, expected 0 or more")
    return chosen


def _refuse_without_effect(
    functions: Mapping[str, Function | None], chosen: PlanOptions, *, has_profile: bool
) -> None:
    """Refuse what would be ignored, by name."""
    if chosen.precisions is not None and "precision" in chosen.fix:
        raise ConfigError(
            f"precision = {chosen.fix['precision']!r} is fixed, and {', '.join(chosen.precisions)} may be chosen",
            remedy="leave one of them out",
        )
    if chosen.hosts and not chosen.trials:
        raise ConfigError(
            f"hosts = {chosen.hosts!r} say where trials run, and there are none",
            remedy="add trials, or leave hosts out: how many ranks there are is said by the number of ranks",
        )
    if not has_profile:
        return
    given = ["measure"] if chosen.measure else []
    if not chosen.trials:
        given += [name for name, function in functions.items() if function is not None]
    if given:
        raise ConfigError(
            f"{given[0]} has no effect beside a profile, which has the model already",
            remedy="leave one of them out" + ("" if chosen.measure else "; trials alone take functions beside it"),
        )


def _fixed(fix: Mapping[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(Plan)
    known = [each.name for each in fields(Plan)]
    found = {}
    for key, value in fix.items():
        if key not in known:
            raise PlanError(f"fix: a plan has no key {key!r}", remedy=did_you_mean(key, known))
        found[key] = convert(value, hints[key], where=f"fix: {key}", name=key, error=PlanError)
    return found


def _profile(
    profile: ModelProfile | str | Path | None,
    functions: Mapping[str, Function | None],
    chosen: PlanOptions,
    cluster: Cluster,
    tensor_recipe: Mapping[str, str] | None,
) -> ModelProfile:
    if profile is not None:
        known = profile if isinstance(profile, ModelProfile) else read_profile(profile)
        if chosen.optimizer not in (PlanOptions.optimizer, known.optimizer):
            raise ConfigError(
                f"the profile of {known.name} was made with {known.optimizer}, not with {chosen.optimizer}",
                remedy="analyse the model again, with the other optimizer",
            )
        if tensor_recipe is not None and list(tensor_recipe.items()) != list(known.tensor_recipe.items()):
            had = dict(known.tensor_recipe) or "none"
            raise ConfigError(
                f"tensor_recipe = {tensor_recipe} is fixed, and the profile of {known.name} was made with {had}",
                remedy="leave the recipe out, or analyse the model again: give its functions, not a profile",
            )
        return known
    model, batch, loss = (_loaded(functions[name], name) for name in ("model", "batch", "loss"))
    if model is None or batch is None:
        raise ConfigError(
            f"there is no {'model' if model is None else 'batch'} to plan for",
            remedy="give a function for the model and one for its batch (plan --batch), or a profile (--profile)",
        )
    make: Callable[[], nn.Module] = model
    place = as_a_rank_of(cluster) if chosen.measure else None
    found = analyse(
        make, batch, loss=loss, optimizer=chosen.optimizer, device=cluster.operations, tensor_recipe=tensor_recipe
    )
    if place is not None:
        found = measure_units(found, Timing(make, Batches(batch), loss, **place))
    return found if loss is not None else replace(found, notes=(*found.notes, _NO_LOSS))


def _loaded(function: Function | None, what: str) -> Callable[..., Any] | None:
    return load_function(function, what=f"the {what}") if isinstance(function, str) else function


def _tried(
    answer: PlanAnswer,
    profile: ModelProfile,
    cluster: Cluster,
    functions: Mapping[str, Function | None],
    chosen: PlanOptions,
) -> PlanAnswer:
    """Run the best plans for some steps, and rank by what was measured."""
    texts = {name: _text(function, name) for name, function in functions.items()}
    assert texts["model"] is not None, "find_plan refuses trials without a model"
    assert texts["batch"] is not None, "find_plan refuses trials without a batch"
    request = TrialsRequest(
        model=texts["model"], batch=texts["batch"], loss=texts["loss"], optimizer=chosen.optimizer,
        seconds=chosen.trial_seconds, limit_bytes=chosen.memory_bytes, hosts=chosen.hosts,
    )  # fmt: skip
    candidates = [option.candidate for option in to_try(answer, chosen.trials)]
    trials = run_trials(candidates, request)
    measured: list[Measured] = [
        (candidate, trial.seconds, _outcome(trial)) for candidate, trial in zip(candidates, trials, strict=True)
    ]
    return with_trials(answer, measured, profile, cluster)


def _outcome(trial: PlanTrial) -> str:
    if not trial.works and trial.is_memory:
        return f"out of memory: {trial.problem}"
    return trial.to_text()


def _text(function: Function | None, what: str) -> str | None:
    if function is None or isinstance(function, str):
        return function
    return text_of(function, what)
