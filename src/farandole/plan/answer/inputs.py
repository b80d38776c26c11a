"""What a plan was made from, beside its file: the cluster and the model's profile, for `farandole simulate`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...core.cluster.cluster import Cluster
from ...core.cluster.cluster_file import read_cluster, write_cluster
from ...core.vocabulary.errors import ConfigError
from ..model.profile import ModelProfile
from ..model.profile_file import read_profile, write_profile


def cluster_path(plan_path: Path) -> Path:
    """Return where the cluster of a plan file is: ``plan.cluster.toml`` beside ``plan.toml``."""
    return plan_path.with_name(f"{plan_path.stem}.cluster.toml")


def profile_path(plan_path: Path) -> Path:
    """Return where the profile of a plan file's model is: ``plan.profile.json`` beside ``plan.toml``."""
    return plan_path.with_name(f"{plan_path.stem}.profile.json")


def write_inputs(profile: ModelProfile, cluster: Cluster, plan_path: Path) -> None:
    """Write both beside a plan file. A cluster that no file can hold is left out.

    Raises:
        ConfigError: the profile cannot be written.
    """
    write_profile(profile, profile_path(plan_path))
    with contextlib.suppress(ConfigError):  # made by hand, with figures that a file may not have
        write_cluster(cluster, cluster_path(plan_path))


def read_inputs(plan_path: Path) -> tuple[ModelProfile, Cluster]:
    """Return what a plan was made from. Raises `ConfigError` if a file is missing or cannot be used."""
    for path in (profile_path(plan_path), cluster_path(plan_path)):
        if not path.is_file():
            raise ConfigError(
                f"{plan_path}: there is no {path.name} beside it",
                remedy="make the plan with: farandole plan --out",
            )
    return read_profile(profile_path(plan_path)), read_cluster(cluster_path(plan_path))
