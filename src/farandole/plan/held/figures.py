"""Figures of a cluster by their paths, such as ``tiers.0.collectives.all_reduce.bytes_per_second``.

A path that ends in ``.*`` is all figures below it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...core.cluster.cluster import Cluster
from ...core.cluster.coefficient import Coefficient
from ...core.vocabulary.errors import ConfigError

_SPEED = "_per_second"


def figures_below(cluster: Cluster, path: str) -> dict[str, Coefficient]:
    """Return the figure of a path, or all figures below one that ends in ``.*``, by their own paths.

    Raises `ConfigError` if the cluster has none there.
    """
    prefix = path.removesuffix(".*")
    found: Any = cluster
    for key in prefix.split("."):
        found = _entry(found, key)
    figures = dict(_figures(found, prefix))
    if not figures or (prefix == path and path not in figures):
        raise ConfigError(f"cluster {cluster.name}: there is no figure {path}")
    return figures


def is_speed(path: str) -> bool:
    """Return whether twice the figure is half the time."""
    return path.endswith(_SPEED)


def with_figures(cluster: Cluster, figures: Mapping[str, Coefficient]) -> Cluster:
    """Return the cluster with other figures at these paths."""
    changed: Any = cluster
    for path, figure in figures.items():
        changed = _replaced(changed, path.split("."), figure)
    found: Cluster = changed
    return found


def _entry(value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(value):
        return getattr(value, key, None)
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, tuple) and key.isdigit() and int(key) < len(value):
        return value[int(key)]
    return None


def _figures(value: Any, path: str) -> list[tuple[str, Coefficient]]:
    if isinstance(value, Coefficient):
        return [(path, value)]
    if dataclasses.is_dataclass(value):
        entries = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, tuple):
        entries = [(str(number), each) for number, each in enumerate(value)]
    else:
        entries = []
    return [found for key, each in entries for found in _figures(each, f"{path}.{key}")]


def _replaced(value: Any, keys: list[str], figure: Coefficient) -> Any:
    if not keys:
        return figure
    key, *rest = keys
    inner = _replaced(_entry(value, key), rest, figure)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{key: inner})
    if isinstance(value, Mapping):
        return {**value, key: inner}
    return (*value[: int(key)], inner, *value[int(key) + 1 :])
