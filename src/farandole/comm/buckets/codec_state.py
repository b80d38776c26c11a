"""What the codecs of a bucket keep between steps, by parameter: taken out, merged, put back.

An entry is one rank's part of one parameter's state: plain tensors, numbers and texts.

- ``elements``: tensors with one number for each of the gradient's (residual, velocity), in its shape.
- ``padding``: the same for the gap behind the parameter. Codecs that work on blocks see it too.
- ``numbers``: those of each segment that the parameter lies in. ``others``: a matrix codec's tensors, as they are.
- ``scale`` and ``place``: how to read ``elements``, and for which layout of the bucket they were.

[Note: in a rank's own units] By [Note: conservation] the mean of `own` over the ranks of a circle is the mean
they take. So the mean of their residuals is what is missing of the mean they asked for, and nothing else about
residuals matters to the sum of the steps. With all N ranks in one circle, residuals are in the units of a
rank's own gradient. On M hosts of G ranks, a circle is one rank of each host, and its gradient is the host's
mean of one slice: what is missing there is (sum over hosts of raw) / M. The N = M G ranks say the same as a
mean over all of them when each counts G times raw in its slice and 0 elsewhere: (sum over hosts of G raw) / (M
G). So ``scale`` is G there, and 1 in one circle. Entries keep raw, so that the same bits come back; only
`merge` multiplies.

[Note: every rank takes the mean] After a change of ranks nobody can have his own residual back. Each rank takes
R, the mean of scale x raw over the old ranks. In one circle the mean of these is R. Across hosts, ranks that
each ask for R more in their gradient ask for R more in the host's mean: raw is R there as well, for any G.
Velocity is linear in the gradients, hence the same holds for it. Padding belongs to no parameter and begins at
zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import ConfigError
from ..messages.message import State
from .coded_bucket import CodedBucket

Entry = dict[str, Any]
_KINDS = {
    "codec": str, "scale": int, "place": list, "elements": dict, "padding": dict, "numbers": list, "others": dict,
}  # fmt: skip


@dataclass(frozen=True)
class _Sorted:
    """A codec's state by what can be done with it."""

    elements: dict[str, torch.Tensor]
    numbers: dict[str, float]
    others: dict[str, torch.Tensor]


# -- out of a bucket -------------------------------------------------------------------------------


def export(bucket: CodedBucket, names: Sequence[str]) -> dict[str, Entry]:
    """Return this rank's entries of the bucket's members, copied; `names` are those of all parameters.

    Raises `ConfigError` for a state that cannot be saved.
    """
    if bucket.made.spec.is_exact:
        return {}
    units = bucket.by_state(bucket.residual)
    states = [_sort(state, unit, bucket) for state, unit in zip(bucket.states, units, strict=True)]
    flats = {key: _side_by_side(bucket, key, states) for key in _keys([state.elements for state in states])}
    laid_out = {key: bucket.by_parameter(flat) for key, flat in flats.items()}
    gaps = {key: bucket.gaps(flat) for key, flat in flats.items()}
    entries = {}
    for i, index in enumerate(bucket.members):
        mine = [states[k] for k in _states_of(bucket, i)]
        entries[names[index]] = {
            "codec": bucket.made.spec.to_text(),
            "scale": bucket.local_size,
            "place": _place(bucket, i),
            "elements": {key: _copy(tensors[i]) for key, tensors in laid_out.items()},
            "padding": {key: _copy(between[i]) for key, between in gaps.items() if bool(between[i].any())},
            "numbers": [state.numbers for state in mine],
            "others": {key: _copy(tensor) for state in mine for key, tensor in state.others.items()},
        }
    return entries


def _sort(state: State, unit: torch.Tensor, bucket: CodedBucket) -> _Sorted:
    found = _Sorted({}, {}, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == unit.shape:
            found.elements[key] = value
        elif isinstance(value, torch.Tensor) and bucket.made.unit == "matrix":
            found.others[key] = value
        elif isinstance(value, (bool, int, float)):
            kind = next(kind for kind in (bool, int, float) if isinstance(value, kind))
            found.numbers[key] = kind(value)  # a plain one: NumPy's are floats too
        else:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ConfigError(
                f"codec {bucket.made.spec.to_text()}: state[{key!r}] is a {type(value).__name__}{shape}, "
                "which cannot be saved",
                remedy=f"keep numbers, and tensors of the gradient's shape, here {tuple(unit.shape)}",
            )
    return found


def _side_by_side(bucket: CodedBucket, key: str, states: Sequence[_Sorted]) -> torch.Tensor:
    """Return the states' tensors `key` in one, laid out as the bucket; zeros where there is none."""
    tensors = [state.elements.get(key) for state in states]
    flat = _empty(bucket, next(tensor for tensor in tensors if tensor is not None))
    for unit, tensor in zip(bucket.by_state(flat), tensors, strict=True):
        if tensor is not None:
            unit.copy_(tensor)
    return flat


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


# -- of several ranks ------------------------------------------------------------------------------


def merge(entries: Sequence[Entry]) -> Entry:
    """Return what every rank takes of one parameter, given the entry of each old rank.

    See [Note: every rank takes the mean]. Numbers are those of the first segment, without those in which the
    ranks differ: such a one is a rank's own (the seed of its random numbers), and begins anew.
    """
    numbers = [entry["numbers"][0] for entry in entries if entry["numbers"]]
    agreed = {
        key: value
        for key, value in (numbers[0] if numbers else {}).items()
        if all(key in other and other[key] == value for other in numbers)
    }
    return {
        "codec": entries[0]["codec"],
        "scale": 1,
        "place": [],
        "elements": {key: _mean(key, entries) for key in _keys([entry["elements"] for entry in entries])},
        "padding": {},
        "numbers": [agreed],
        "others": entries[0]["others"],
    }


def _mean(key: str, entries: Sequence[Entry]) -> torch.Tensor:
    found = [(entry["scale"], entry["elements"][key]) for entry in entries if key in entry["elements"]]
    total = torch.zeros(found[0][1].shape, dtype=torch.float64)
    for scale, tensor in found:
        total.add_(tensor.to(total), alpha=scale)
    return (total / len(entries)).to(found[0][1].dtype)


# -- into a bucket ---------------------------------------------------------------------------------


def check(
    entries: Mapping[str, Any], parameters: Mapping[str, torch.nn.Parameter], codecs: Mapping[str, CodecSpec]
) -> None:
    """Raise `ConfigError` for entries that do not fit these parameters."""
    strangers = [name for name in entries if name not in parameters]
    if strangers:
        listed = ", ".join(repr(name) for name in strangers[:3])
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        raise ConfigError(
            f"exchange state: the model has no parameter {listed}{more}",
            remedy="load it into the model it was saved from",
        )
    for name, entry in entries.items():
        require_entry(name, entry)
        if codecs[name].is_exact:
            raise ConfigError(
                f"exchange state: {name!r} was sent by codec {entry['codec']}, and by this plan it has none, "
                "so what was left would be lost",
                remedy="give it a codec, or do not load its state",
            )
        for key, tensor in entry["elements"].items():
            if tensor.shape != parameters[name].shape:
                raise ConfigError(
                    f"exchange state: {key} of {name!r} has shape {tuple(tensor.shape)}, "
                    f"but the parameter has {tuple(parameters[name].shape)}",
                    remedy="load it into the model it was saved from",
                )


def require_entry(name: str, entry: Any) -> None:
    """Raise `ConfigError` for what is no entry."""
    for key, kind in _KINDS.items():
        if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
            raise ConfigError(
                f"exchange state: the entry of {name!r} has no {key} of type {kind.__name__}",
                remedy="give what farandole.exchange_state returned, as it was",
            )


def restore(buckets: Sequence[CodedBucket], names: Sequence[str], entries: dict[str, Entry]) -> None:
    """Move the `entries` of the buckets' members into the buckets; members without one begin anew.

    Raises `ConfigError`, and changes nothing, when an entry is a slice of another layout than this one.
    """
    coded = [bucket for bucket in buckets if not bucket.made.spec.is_exact]
    for bucket in coded:
        for i, index in enumerate(bucket.members):
            if names[index] in entries:
                _require_place(bucket, i, names[index], entries[names[index]])
    for bucket in coded:
        _put(bucket, [_fitting(bucket, entries.pop(names[index], None)) for index in bucket.members])


def _require_place(bucket: CodedBucket, i: int, name: str, entry: Entry) -> None:
    now, then = _place(bucket, i), entry["place"]
    in_one_circle = bucket.local_size == 1 and entry["scale"] == 1
    if in_one_circle or not then or (now, bucket.local_size) == (then, entry["scale"]):
        return
    raise ConfigError(
        f"exchange state: the route or the buckets changed: [first element of {name!r}, elements of its bucket, "
        f"begin and end of this rank's slice] and the ranks that share a slice were {then} and {entry['scale']}, "
        f"are {now} and {bucket.local_size}",
        remedy="give the list of all ranks' states, in order of rank",
    )


def _fitting(bucket: CodedBucket, entry: Entry | None) -> Entry | None:
    """Return what another codec can use as well: what is left to send."""
    if entry is None or entry["codec"].partition(":")[0] == bucket.made.spec.name:
        return entry
    only = {
        kind: {key: tensor for key, tensor in entry[kind].items() if key == "residual"}
        for kind in ("elements", "padding")
    }
    return {**entry, **only, "numbers": [], "others": {}}


def _put(bucket: CodedBucket, entries: Sequence[Entry | None]) -> None:
    for state, residual in zip(bucket.states, bucket.by_state(bucket.residual.zero_()), strict=True):
        state.clear()
        state["residual"] = residual
    for key in _keys([entry["elements"] for entry in entries if entry is not None]):
        for state, unit in zip(bucket.states, bucket.by_state(_spread(bucket, key, entries)), strict=True):
            if key == "residual":
                state[key].copy_(unit)
            else:
                state[key] = unit.clone()
    for i, entry in enumerate(entries):
        if entry is not None:
            _put_the_rest([bucket.states[k] for k in _states_of(bucket, i)], entry, bucket.flat.device)


def _spread(bucket: CodedBucket, key: str, entries: Sequence[Entry | None]) -> torch.Tensor:
    """Return the entries' tensors `key`, laid out as the bucket; zeros where there is none."""
    found = [(i, entry) for i, entry in enumerate(entries) if entry is not None and key in entry["elements"]]
    flat = _empty(bucket, found[0][1]["elements"][key])
    views, gaps = bucket.by_parameter(flat), bucket.gaps(flat)
    for i, entry in found:
        views[i].copy_(entry["elements"][key])
        if key in entry["padding"] and entry["place"] == _place(bucket, i):
            gaps[i].copy_(entry["padding"][key])
    return flat


def _put_the_rest(states: Sequence[State], entry: Entry, device: torch.device) -> None:
    for k, state in enumerate(states):
        if entry["numbers"]:
            # What a segment already has is of the parameter before this one in it.
            for key, number in entry["numbers"][min(k, len(entry["numbers"]) - 1)].items():
                state.setdefault(key, number)
        for key, tensor in entry["others"].items():
            state[key] = tensor.to(device, copy=True)


# -- where things are ------------------------------------------------------------------------------


def _keys(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({key for mapping in mappings for key in mapping})


def _empty(bucket: CodedBucket, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(bucket.flat.numel(), dtype=like.dtype, device=bucket.flat.device)


def _span(view: torch.Tensor) -> tuple[int, int]:
    begin = int(view.storage_offset())
    return begin, begin + view.numel()


def _states_of(bucket: CodedBucket, i: int) -> list[int]:
    """Return the positions of the states that member `i`, or the gap behind it, has a part in."""
    begin = _span(bucket.dense.gradients.mended()[i])[0]
    end = _span(bucket.gaps(bucket.residual)[i])[1]
    spans = [_span(unit) for unit in bucket.by_state(bucket.residual)]
    return [k for k, (first, last) in enumerate(spans) if first < end and begin < last]


def _place(bucket: CodedBucket, i: int) -> list[int]:
    """Return where member `i` begins, the elements of its bucket, and the slice this rank carries."""
    return [_span(bucket.dense.gradients.mended()[i])[0], bucket.flat.numel(), *bucket.my_slice()]
