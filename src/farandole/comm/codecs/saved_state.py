"""What codecs keep between steps, by the name of each tensor: exported, merged, restored.

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

[Note: every rank takes the mean] After a change of ranks no rank can get its own residual back. Each rank takes
R, the mean of scale x raw over the old ranks. In one circle the mean of these is R. Across hosts, ranks that
each ask for R more in their gradient ask for R more in the host's mean: raw is R there as well, for any G.
Velocity is linear in the gradients, hence the same holds for it. Padding belongs to no parameter and begins at
zero.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import ConfigError
from .codec import leaves
from .units import CodedFlat

Entry = dict[str, Any]
_KINDS = {
    "codec": str, "scale": int, "place": list, "elements": dict, "padding": dict, "numbers": list, "others": dict,
}  # fmt: skip
_SEED = "seed"
"""The one number that differs from rank to rank: see `Draws` in `codecs.quantize`."""


@dataclass(frozen=True)
class _Sorted:
    """A codec's state by what can be done with it."""

    elements: dict[str, torch.Tensor]
    numbers: dict[str, float]
    others: dict[str, torch.Tensor]


# -- export ----------------------------------------------------------------------------------------


def export(coded: CodedFlat, names: Sequence[str]) -> dict[str, Entry]:
    """Return this rank's entries of the parts of `coded`, copied; `names` are those of the parts.

    Raises `ConfigError` for a state that cannot be saved.
    """
    if coded.codec.spec.is_exact:
        return {}
    states = [_sort(coded.states.current[k], shape, coded) for k, shape in enumerate(coded.unit_shapes)]
    flats = {key: _side_by_side(coded, key, states) for key in _keys([state.elements for state in states])}
    laid_out = {key: coded.by_part(flat) for key, flat in flats.items()}
    gaps = {key: coded.gaps(flat) for key, flat in flats.items()}
    entries = {}
    for i, name in enumerate(names):
        local = [states[k] for k in coded.units_of(i)]
        entries[name] = {
            "codec": coded.codec.spec.to_text(),
            "scale": coded.local_size,
            "place": _place(coded, i),
            "elements": {key: _copy(tensors[i]) for key, tensors in laid_out.items()},
            "padding": {key: _copy(between[i]) for key, between in gaps.items() if bool(between[i].any())},
            "numbers": [state.numbers for state in local],
            "others": {key: _copy(tensor) for state in local for key, tensor in state.others.items()},
        }
    return entries


def _sort(state: Any, shape: tuple[int, ...], coded: CodedFlat) -> _Sorted:
    found = _Sorted({}, {}, {})
    for key, value in leaves(state).items():
        if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
            found.elements[key] = value
        elif isinstance(value, torch.Tensor) and coded.codec.granularity == "matrix":
            found.others[key] = value
        elif isinstance(value, (bool, int, float)):
            kind = next(kind for kind in (bool, int, float) if isinstance(value, kind))
            found.numbers[key] = kind(value)  # a plain one: NumPy's are floats too
        else:
            size = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ConfigError(
                f"codec {coded.codec.spec.to_text()}: {key!r} of its state is a {type(value).__name__}{size}, "
                "which cannot be saved",
                remedy=f"keep numbers, and tensors of the gradient's shape, here {shape}",
            )
    return found


def _side_by_side(coded: CodedFlat, key: str, states: Sequence[_Sorted]) -> torch.Tensor:
    """Return the states' tensors `key` in one, laid out as the bucket; zeros where there is none."""
    tensors = [state.elements.get(key) for state in states]
    flat = _empty(coded, next(tensor for tensor in tensors if tensor is not None))
    for unit, tensor in zip(coded.by_unit(flat), tensors, strict=True):
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


def for_new_rank(entry: Entry) -> Entry:
    """Return what a rank that is new takes of one parameter, given another's entry: nothing that is its own."""
    nothing = {
        kind: {key: torch.zeros_like(tensor) for key, tensor in entry[kind].items()}
        for kind in ("elements", "padding")
    }
    numbers = [{key: value for key, value in each.items() if key != _SEED} for each in entry["numbers"]]
    return {**entry, **nothing, "numbers": numbers}


def _mean(key: str, entries: Sequence[Entry]) -> torch.Tensor:
    found = [(entry["scale"], entry["elements"][key]) for entry in entries if key in entry["elements"]]
    total = torch.zeros(found[0][1].shape, dtype=torch.float64)
    for scale, tensor in found:
        total.add_(tensor.to(total), alpha=scale)
    return (total / len(entries)).to(found[0][1].dtype)


# -- restore --------------------------------------------------------------------------------------


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
                f"exchange state: {name!r} used codec {entry['codec']}, and has none by this plan, "
                "so its residual would be lost",
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


def common_part(entry: Entry) -> str:
    """Return what must be the same on all ranks that exchange by this state: its numbers and factors.

    Residuals and velocities are a rank's own, and so is the seed of its random numbers. What the numbers of a
    user-defined codec mean is not known.
    """
    said = f"codec {entry['codec']}, {', '.join(sorted({*entry['elements'], *entry['others']})) or 'no tensor'}"
    if CodecSpec.parse(entry["codec"]).is_own:
        return said
    numbers = [{key: value for key, value in each.items() if key != _SEED} for each in entry["numbers"]]
    digest = hashlib.sha256()
    for _, tensor in sorted(entry["others"].items()):
        digest.update(tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
    factors = f", factors {digest.hexdigest()[:8]}" if entry["others"] else ""
    return f"{said}, numbers {json.dumps(numbers, sort_keys=True)}{factors}"


def restore(targets: Sequence[tuple[CodedFlat, Sequence[str]]], entries: dict[str, Entry]) -> None:
    """Move the `entries` of the parts of `targets`, given with the parts' names, into them; others begin anew.

    Raises `ConfigError`, and changes nothing, when an entry is a slice of another layout than this one.
    """
    inexact = [(coded, names) for coded, names in targets if not coded.codec.spec.is_exact]
    for coded, names in inexact:
        for i, name in enumerate(names):
            if name in entries:
                _require_place(coded, i, name, entries[name])
    for coded, names in inexact:
        _put(coded, [_fitting(coded, entries.pop(name, None)) for name in names])


def _require_place(coded: CodedFlat, i: int, name: str, entry: Entry) -> None:
    now, then = _place(coded, i), entry["place"]
    in_one_group = coded.local_size == 1 and entry["scale"] == 1
    if in_one_group or not then or (now, coded.local_size) == (then, entry["scale"]):
        return
    raise ConfigError(
        f"exchange state: the route or the buckets changed: [first element of {name!r}, elements of its bucket, "
        f"begin and end of this rank's slice] and the ranks that share a slice were {then} and {entry['scale']}, "
        f"are {now} and {coded.local_size}",
        remedy="give the list of all ranks' states, in order of rank",
    )


def _fitting(coded: CodedFlat, entry: Entry | None) -> Entry | None:
    """Return what another codec can use as well: the residual."""
    if entry is None or entry["codec"].partition(":")[0] == coded.codec.spec.name:
        return entry
    only = {
        kind: {key: tensor for key, tensor in entry[kind].items() if key == "residual"}
        for kind in ("elements", "padding")
    }
    return {**entry, **only, "numbers": [], "others": {}}


def _put(coded: CodedFlat, entries: Sequence[Entry | None]) -> None:
    kept: list[dict[str, Any]] = [{} for _ in coded.unit_shapes]
    for key in _keys([entry["elements"] for entry in entries if entry is not None]):
        for unit, tensor in zip(kept, coded.by_unit(_spread(coded, key, entries)), strict=True):
            unit[key] = tensor.clone()
    for i, entry in enumerate(entries):
        if entry is not None:
            _put_the_rest([kept[k] for k in coded.units_of(i)], entry, coded.device)
    for k, unit in enumerate(kept):
        coded.states.load(k, coded.like_unit(k), unit)


def _spread(coded: CodedFlat, key: str, entries: Sequence[Entry | None]) -> torch.Tensor:
    """Return the entries' tensors `key`, laid out as the bucket; zeros where there is none."""
    found = [(i, entry) for i, entry in enumerate(entries) if entry is not None and key in entry["elements"]]
    flat = _empty(coded, found[0][1]["elements"][key])
    parts, gaps = coded.by_part(flat), coded.gaps(flat)
    for i, entry in found:
        parts[i].copy_(entry["elements"][key])
        if key in entry["padding"] and entry["place"] == _place(coded, i):
            gaps[i].copy_(entry["padding"][key])
    return flat


def _put_the_rest(units: Sequence[dict[str, Any]], entry: Entry, device: torch.device) -> None:
    for k, unit in enumerate(units):
        if entry["numbers"]:
            # What a segment already has is of the parameter before this one in it.
            for key, number in entry["numbers"][min(k, len(entry["numbers"]) - 1)].items():
                unit.setdefault(key, number)
        for key, tensor in entry["others"].items():
            unit[key] = tensor.to(device, copy=True)


# -- where things are ------------------------------------------------------------------------------


def _keys(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({key for mapping in mappings for key in mapping})


def _empty(coded: CodedFlat, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(coded.elements, dtype=like.dtype, device=coded.device)


def _place(coded: CodedFlat, i: int) -> list[int]:
    """Return where part `i` begins, the elements of its bucket, and the slice this rank exchanges."""
    return [coded.parts[i].offset, coded.elements, *coded.bounds]
