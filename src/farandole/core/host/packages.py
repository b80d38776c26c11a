"""What is installed, as the packages say it: none of them is imported, which can take seconds."""

from __future__ import annotations

import importlib.metadata

TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "tf-nightly",
    "tf-nightly-cpu",
)
"""All of them write the same folder, so a machine should have one of them."""


def package_version(name: str) -> str:
    """Return the version of an installed package without importing it; empty when there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_tensorflow() -> dict[str, str]:
    """Return the versions of TensorFlow that are installed, by the name of the distribution."""
    versions = {name: package_version(name) for name in TENSORFLOW_DISTRIBUTIONS}
    return {name: version for name, version in versions.items() if version}
