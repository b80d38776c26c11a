"""A cluster by what a user writes after ``--cluster``: a file, or the name of a preset."""

from __future__ import annotations

from pathlib import Path

from ..vocabulary.errors import ConfigError
from .cluster import Cluster
from .cluster_file import read_cluster
from .presets import parse_preset, preset_cluster
from .resize import with_ranks

_FILES = (".toml", ".json")


def find_machines(text: str, ranks: int) -> Cluster:
    """Return the cluster of a file with the ranks that it was measured with, or of a preset with `ranks`.

    Raises as `find_cluster`, for ranks that the machines cannot have too: `with_ranks` resizes what is returned.
    """
    if not _is_file(text):
        return find_cluster(text, ranks)
    cluster = find_cluster(text)
    with_ranks(cluster, ranks)
    return cluster


def find_cluster(text: str, ranks: int | None = None) -> Cluster:
    """Return the cluster of a file or a preset, with `ranks` ranks (default: those of the file).

    Raises `ConfigError` for a file that is not there or cannot be read, an unknown preset, a preset without
    a number of ranks, and ranks that do not fill whole hosts.
    """
    if _is_file(text):
        cluster = read_cluster(Path(text))
        return cluster if ranks is None else with_ranks(cluster, ranks)
    parse_preset(text)
    if ranks is None:
        raise ConfigError(f"preset {text!r} has no number of ranks of its own", remedy="say how many: --gpus 16")
    return preset_cluster(text, ranks)


def _is_file(text: str) -> bool:
    path = Path(text)
    return path.suffix in _FILES or "/" in text or path.is_file()
