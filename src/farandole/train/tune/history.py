"""What won in earlier runs of the same job: one small file a job in the cache directory of the user.

[Note: the same job] Jobs are the same where the shapes and types of the parameters, what trains, the ranks by host
and the plan's other keys are. Links change: an entry holds the rate that was measured, and is used for links
within a factor of two of it. What is read is only what is tried first: a file that says nonsense costs one trial.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.environ.env import SETTINGS, read_cache_directory
from ...core.step_model.bucket_plan import ExchangeKeys
from ...core.vocabulary.run_files import write_private
from .switching import ExchangeSwitch

_VERSION = 1
_SAME_LINK = 2.0
_MOST_ENTRIES = 8
_LARGEST_FILE_BYTES = 2**20
_NOT_OF_THE_JOB = (*SETTINGS, "predicted")
"""Keys of the plan that jobs of one kind may differ in."""


def facts_of(here: World, switch: ExchangeSwitch) -> dict[str, Any]:
    """Return what tells jobs apart, and a fingerprint of it; called by all ranks, complete on each of them."""
    places = all_gather_json(here, "tuning/places", [here.host, here.device.type])
    parameters = [
        [name, list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
        for reducer in switch.reducers
        for name, parameter in reducer.parts.buckets.table.named
    ]
    others = {key: value for key, value in switch.plan.to_mapping().items() if key not in _NOT_OF_THE_JOB}
    told = json.dumps([parameters, places, others], sort_keys=True)
    return {
        "fingerprint": hashlib.sha256(told.encode()).hexdigest()[:16],
        "ranks": here.size,
        "hosts": sorted({host for host, _ in places}),
        "parameter_bytes": sum(parameter.nbytes for reducer in switch.reducers
                               for _, parameter in reducer.parts.buckets.table.named),
    }  # fmt: skip


class TuneHistory:
    """The file of one job. Reading and writing never raise: without a cache, runs start from nothing."""

    def __init__(self, fingerprint: str) -> None:
        cache = read_cache_directory()
        self._path = None if cache is None else Path(cache) / "farandole" / "tune" / f"{fingerprint}.json"

    def find(self, link_bytes_per_second: float | None) -> tuple[ExchangeKeys, bool] | None:
        """Return what won last over such a link, and whether that run had tried all it would; None: nothing."""
        for entry in reversed(self._entries()):
            with suppress(TypeError, KeyError, ValueError):
                if _is_same(entry["link"], link_bytes_per_second):
                    return ExchangeKeys.from_mapping(entry["keys"]), bool(entry["settled"])
        return None

    def keep(self, keys: ExchangeKeys, link_bytes_per_second: float | None, *, settled: bool) -> None:
        """Keep what won, instead of what won over such a link before; a search that is complete stays so."""
        if self._path is None:
            return
        settled = settled or self.find(link_bytes_per_second) == (keys, True)
        entries = [each for each in self._entries() if not _is_same(each.get("link"), link_bytes_per_second)]
        entries.append({"link": link_bytes_per_second, "keys": keys.to_mapping(), "settled": settled})
        with suppress(OSError):
            _make_private(self._path.parent)
            write_private(self._path, json.dumps({"version": _VERSION, "entries": entries[-_MOST_ENTRIES:]}))

    def _entries(self) -> list[Mapping[str, Any]]:
        if self._path is None:
            return []
        with suppress(OSError, ValueError, RecursionError, AttributeError, TypeError):
            if self._path.stat().st_size <= _LARGEST_FILE_BYTES:
                found = json.loads(self._path.read_text(encoding="utf-8"))
                entries = found.get("entries") if found.get("version") == _VERSION else None
                return [each for each in entries or [] if isinstance(each, dict)]
        return []


def _make_private(directory: Path) -> None:
    for missing in [place for place in (directory, *directory.parents) if not place.exists()][::-1]:
        missing.mkdir(mode=0o700, exist_ok=True)


def _is_same(one: Any, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return isinstance(one, (int, float)) and one > 0 and 1 / _SAME_LINK < other / one < _SAME_LINK
