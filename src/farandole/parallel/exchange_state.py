"""`fd.exchange_state` and `fd.load_exchange_state`: what codecs keep between steps is part of a run's state.

[Note: one dict a rank] Residuals differ from rank to rank, so each rank saves its own dict. With the same ranks
and buckets each loads its own again, and the run goes on bit for bit. Otherwise every rank loads the list of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from torch import nn

from ..comm.codecs.saved_state import Entry, merge, require_entry
from ..comm.device.streams import has_streams
from ..comm.engine.parameters import device_of
from ..comm.engine.reducer import GradientReducer
from ..comm.world.world import world
from ..core.vocabulary.codec_spec import NONE
from ..core.vocabulary.degrees import ORDER, Degrees, degrees_of
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.rules import MOST_ZERO
from .model import DistributedModel
from .zero.passes import ShardedModel

VERSION = 1
"""Version of the dict's layout; a newer one is refused."""
_PARTS = ("pipeline", "tensor")
"""Degrees whose ranks have other parts of the model."""
_AS_IT_WAS = "give what farandole.exchange_state returned, as it was"


def exchange_state(model: nn.Module) -> dict[str, Any]:
    """Return the codec state of `model` on this rank: residuals, velocities, factors and counters.

    Save it beside model and optimizer, one file per rank; `torch.load` with ``weights_only=True`` reads it.

    Args:
        model: a model that `distribute` has distributed.

    Returns:
        A dict by parameter name; tensors are copies in CPU memory. It is empty if no parameter has a codec, and
        before the first backward pass.

    Raises:
        ConfigError: the state of a user-defined codec cannot be saved; the message names it.
    """
    exchange = _exchange(model)
    entries = {} if exchange is None else exchange.exchange_state()
    if not entries:
        return {}
    here = world()
    found = {"version": VERSION, "rank": here.rank, "size": here.size, "parameters": entries}
    degrees = _degrees(model)
    if not degrees.is_data_alone:
        found["degrees"] = asdict(degrees)
    return {**found, "layout": residual_layout(model)}


def residual_layout(model: nn.Module) -> str:
    """Return what decides which elements each rank of so many keeps residuals of.

    Where that differs, the ranks' states are merged.
    """
    plan, here = DistributedModel.of(model).plan, world()
    if plan is None:
        return ""
    degrees = degrees_of(plan, here.size)
    if plan.zero == MOST_ZERO:
        return f"units of {degrees.shard if degrees.shard > 1 else degrees.data}"
    kind = "rows" if plan.zero else "elements"
    if plan.route == "flat":
        return f"{kind}, flat"
    # See `comm.routes`: on accelerators codecs go by slices of hosts.
    is_sliced = has_streams(device_of(list(model.parameters())))
    return ("slices of " if is_sliced else "") + (
        f"{kind}, {plan.route}, hosts {here.node_count} x {here.local_size}, buckets {plan.first_bucket_bytes} "
        f"{plan.bucket_bytes}"
    )


def load_exchange_state(model: nn.Module, state_or_states: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
    """Load what `exchange_state` returned. Call it on every rank, at any time after `distribute`.

    The previous codec state is replaced. With a list, every rank takes the *mean* of the old ranks' residuals and
    velocities. Residuals reach the parameters only through the mean over the ranks, and the mean of equal values
    is that value, so nothing is lost or counted twice. A divided model (``tensor``, ``pipeline``) must be
    divided as it was; each rank then takes the mean over the old ranks with the same part of it.

    Args:
        model: a model that `distribute` has distributed.
        state_or_states: either this rank's own dict, if the number of ranks, the route and the buckets are
            unchanged (the run continues bit for bit), or the list of all old ranks' dicts in rank order, for any
            number of ranks, route and buckets.

    Raises:
        ConfigError: the state does not fit. With shards of other buckets (route "hierarchical") this is raised
            when the buckets are built, at the end of the first backward pass.
    """
    exchange = _exchange(model)
    if isinstance(state_or_states, Mapping):
        entries = _own(state_or_states, _degrees(model))
    elif isinstance(state_or_states, (list, tuple)):
        entries = _merged(state_or_states, _degrees(model))
        if any(
            str(state.get("layout", state.get("of"))).startswith(("rows", "units")) for state in state_or_states
        ):
            entries = _that_fit(model, exchange, entries)
    else:
        raise ConfigError(
            f"exchange state: expected a dict or a list of dicts, got {type(state_or_states).__name__}",
            remedy=_AS_IT_WAS,
        )
    entries = _of_stage(model, entries)
    if exchange is not None:
        exchange.load_exchange_state(entries)
    elif entries:
        is_sharded = DistributedModel.of(model).sharded is not None
        why = "at zero = 3 this plan has no codec" if is_sharded else "a world of one rank exchanges nothing"
        warnings.warn(
            f"farandole: {why}, so what the codecs had left is dropped",
            RuntimeWarning,
            stacklevel=2,
        )


def _that_fit(
    model: nn.Module, exchange: GradientReducer | ShardedModel | None, entries: dict[str, Entry]
) -> dict[str, Entry]:
    """Return the entries of parameters that have a codec here; warn of the others, if the plan has codecs.

    At stage 3 all parameters of a unit travel by the codec; elsewhere small ones and vectors are exact.
    """
    if not isinstance(exchange, GradientReducer):
        return entries
    codecs = exchange.buckets.codecs.by_name
    exact = [name for name in entries if name in codecs and codecs[name].is_exact]
    plan, _ = DistributedModel.of(model).plan_and_mesh
    if not exact or all(each == NONE for each in (plan.codec, *plan.codec_for.values())):
        return entries
    warnings.warn(
        f"farandole: {len(exact)} parameters such as {exact[0]!r} have no codec at this ZeRO stage, so what the "
        "codec had left of them is dropped",
        RuntimeWarning,
        stacklevel=3,
    )
    return {name: entry for name, entry in entries.items() if name not in exact}


def _of_stage(model: nn.Module, entries: dict[str, Entry]) -> dict[str, Entry]:
    """Return the entries of parameters that this rank of a pipeline has; warn of others."""
    own = DistributedModel.of(model)
    pipeline = own.pipeline
    if pipeline is None:
        return entries
    here = set() if pipeline.own is None else {name for name, _ in own.parameters_here(model)}
    kept = {name: entry for name, entry in entries.items() if name in here}
    if len(kept) < len(entries):
        why = (
            "the pipeline is not cut before the first farandole.step (load after it)"
            if pipeline.own is None
            else "the pipeline is cut elsewhere"
        )
        warnings.warn(
            f"farandole: {why}, so what the codecs had left of {len(entries) - len(kept)} parameters is dropped",
            RuntimeWarning,
            stacklevel=3,
        )
    return kept


def _exchange(model: nn.Module) -> GradientReducer | ShardedModel | None:
    """Return what exchanges the gradients; None where no codec can."""
    distributed = DistributedModel.require(model, "exchange state")
    sharded = distributed.sharded
    return sharded if sharded is not None and sharded.has_codecs else distributed.reducer


def _degrees(model: nn.Module) -> Degrees:
    _, mesh = DistributedModel.of(model).plan_and_mesh
    return mesh.degrees


def _require_parts(state: Mapping[str, Any], degrees: Degrees) -> Degrees:
    """Return how the model of `state` was divided; raise `ConfigError` where it is divided otherwise now."""
    saved = Degrees(**state["degrees"]) if "degrees" in state else Degrees(data=state["size"])
    if any(getattr(saved, name) != getattr(degrees, name) for name in _PARTS):
        raise ConfigError(
            f"exchange state: saved with {saved}, and the plan has {degrees}: ranks have other parts of the model",
            remedy=f"load it with equal {' and '.join(_PARTS)}, or leave it out",
        )
    return saved


def _own(state: Mapping[str, Any], degrees: Degrees) -> dict[str, Entry]:
    if not state:
        return {}
    _require_state(state)
    here, rank, size = world(), state["rank"], state["size"]
    if size != here.size:
        raise ConfigError(
            f"exchange state: saved by {size} ranks, but there are {here.size} now",
            remedy=f"give the list of all {size} ranks' states, in order of rank",
        )
    if rank != here.rank:
        raise ConfigError(
            f"exchange state: this is rank {rank}'s, given to rank {here.rank}",
            remedy=f"give each rank its own, or every rank the list of all {size}",
        )
    _require_parts(state, degrees)
    return dict(state["parameters"])


def _merged(states: Sequence[Any], degrees: Degrees) -> dict[str, Entry]:
    if not any(states):
        return {}
    for state in states:
        _require_state(state)
    found = [(state["rank"], state["size"]) for state in states]
    if found != [(rank, len(states)) for rank in range(len(states))]:
        listed = ", ".join(f"{rank} of {size}" for rank, size in found)
        raise ConfigError(
            f"exchange state: a list with the states of ranks {listed}",
            remedy=f"give the states of all {found[0][1]} ranks, in order of rank",
        )
    saved, mine = _require_parts(states[0], degrees), degrees.place(world().rank)
    places = [saved.place(rank) for rank in range(len(states))]
    same = [all(place[name] == mine[name] for name in _PARTS) for place in places]
    parameters = [state["parameters"] for state, is_same in zip(states, same, strict=True) if is_same]
    for rank, other in enumerate(parameters):
        _require_alike(parameters[0], other, rank)
    return {name: merge([other[name] for other in parameters]) for name in parameters[0]}


def _require_state(state: Any) -> None:
    if not isinstance(state, Mapping) or not isinstance(state.get("version"), int):
        what = "a dict without a version" if isinstance(state, Mapping) else type(state).__name__
        raise ConfigError(f"exchange state: got {what}", remedy=_AS_IT_WAS)
    if state["version"] > VERSION:
        raise ConfigError(
            f"exchange state: version {state['version']}, and this farandole knows up to {VERSION}",
            remedy="load it with the farandole that saved it, or a newer one",
        )
    for key, kind in (("rank", int), ("size", int), ("parameters", dict)):
        if not isinstance(state.get(key), kind):
            raise ConfigError(f"exchange state: no {key} of type {kind.__name__} in it", remedy=_AS_IT_WAS)

    degrees = state.get("degrees", {})
    sizes = degrees.values() if isinstance(degrees, Mapping) and set(degrees) <= set(ORDER) else [0]
    if not all(type(each) is int and each > 0 for each in sizes) or (degrees and prod(sizes) != state["size"]):
        raise ConfigError(f"exchange state: degrees {degrees!r:.80}", remedy=_AS_IT_WAS)


def _require_alike(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    differing = sorted(set(first) ^ set(other))
    if differing:
        raise ConfigError(
            f"exchange state: rank 0's and rank {rank}'s differ in {differing[0]!r}",
            remedy="give states that were saved after the same step",
        )
    for name, entry in other.items():
        require_entry(name, entry)
        for key, tensor in entry["elements"].items():
            expected = first[name]["elements"].get(key, tensor).shape
            if tensor.shape != expected:
                raise ConfigError(
                    f"exchange state: {key} of {name!r} has shape {tuple(tensor.shape)} on rank {rank} "
                    f"and {tuple(expected)} on rank 0",
                    remedy="give states that were saved after the same step",
                )
