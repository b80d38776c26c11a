"""``cluster.toml``: a cluster on disk, read strictly and written in one piece.

docs/cluster-file.md has the format.

Standard library only: planning reads it without torch.
"""

from __future__ import annotations

from pathlib import Path

from ..vocabulary.config import read_mapping
from ..vocabulary.errors import ConfigError
from ..vocabulary.run_files import write_private
from .cluster import Cluster
from .decode import FieldPath, decode
from .encode import to_toml
from .limits import check_cluster, check_version

_HEAD = """\
# What a cluster gives, for `farandole plan`. See docs/cluster-file.md.
# Sources: "measured" here, "preset" from a table and not measured, "fitted" to runs.
"""


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a ``.toml`` or ``.json`` file.

    Raises `ConfigError` with file and path of the field for unknown keys, wrong types, and figures that cannot be:
    ``cluster.toml: tiers.1.collectives.all_reduce.bytes_per_second = 0, expected more than 0``. Entries of lists
    are numbered from 0.
    """
    where = str(path)
    values = read_mapping(
        Path(path), remedy="farandole measure --out cluster.toml writes one of the machines here"
    )
    check_version(values.get("version"), FieldPath(where))
    cluster = decode(Cluster, values, FieldPath(where))
    check_cluster(cluster, where)
    return cluster


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster as TOML, in one piece; `read_cluster` gives an equal one back.

    Raises `ConfigError` for a cluster that could not be read again, and where the file cannot be written.
    """
    if Path(path).suffix == ".json":
        raise ConfigError(f"{path}: a cluster is written as TOML", remedy="name a file that ends in .toml")
    check_cluster(cluster, str(path))
    try:
        write_private(Path(path), _HEAD + to_toml(cluster))
    except (OSError, UnicodeEncodeError) as problem:
        raise ConfigError(
            f"cannot write {path}: {problem}", remedy="name a file in a folder that is there"
        ) from None
