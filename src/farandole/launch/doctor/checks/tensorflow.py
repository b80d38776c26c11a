"""Whether TensorFlow and Keras, where they are installed, can train here. Hosts without both have no findings."""

from __future__ import annotations

from ..facts.facts import ClusterFacts, HostFacts
from ..facts.finding import ClusterFinding, Findings
from .versions import compare

_OLDEST, _OLDEST_KERAS = (2, 16), (3, 3)
_TRAINS = ("tensorflow", "torch", "jax")


def check_tensorflow(facts: ClusterFacts) -> Findings:
    """One TensorFlow, new enough, the same everywhere, and a compiler for its operations."""
    for host in facts.hosts:
        found = host.tensorflow
        if len(found.tensorflow) > 1:
            wanted = _fitting(host)
            versions = [f"{name} {version}" for name, version in found.tensorflow.items()]
            yield ClusterFinding(
                f"{host.name} has {' and '.join(versions)}",
                "all of them write the same folder: the one installed last is imported, and to remove any breaks "
                "the others (pip install tf-keras brings tensorflow: give it --no-deps)",
                f"{_pip(host)} uninstall -y {' '.join(found.tensorflow)}; {host.software.pip_install} "
                f"{wanted}=={found.tensorflow[wanted]}",
                "warning",
                host.name,
            )
        if found.version and _numbers(found.version) < _OLDEST:
            yield ClusterFinding(
                f"{host.name} has TensorFlow {found.version}, older than 2.16",
                "farandole.horovod.tensorflow refuses it",
                f"{host.software.pip_install} '{found.distribution}>=2.16'",
                "warning",
                host.name,
            )
        if found.version and not found.cpp_compiler:
            yield ClusterFinding(
                f"{host.name} has TensorFlow and no C++ compiler",
                "exchanges inside graphs go through tf.numpy_function, one after the other, so none runs beside "
                "the backward pass",
                "apt-get install g++",
                "warning",
                host.name,
            )
    yield from compare(
        facts.hosts, "TensorFlow", lambda host: host.tensorflow.version,
        severity="warning",
        why="graphs and random numbers of two versions differ",
        fix=lambda host, usual: f"{host.software.pip_install} {host.tensorflow.distribution}=={usual}",
    )  # fmt: skip


def check_keras(facts: ClusterFacts) -> Findings:
    """Keras is new enough, the same everywhere, and its backend is there and can train."""
    for host in facts.hosts:
        found = host.tensorflow
        if (3, 0) <= _numbers(found.keras) < _OLDEST_KERAS:
            yield ClusterFinding(
                f"{host.name} has Keras {found.keras}, older than 3.3",
                "farandole.horovod.keras is made for Keras 3.3 and newer",
                f"{host.software.pip_install} 'keras>=3.3'",
                "warning",
                host.name,
            )
        yield from _check_backend(host)
        yield from _check_legacy(host)
    yield from compare(
        facts.hosts, "Keras", lambda host: host.tensorflow.keras,
        severity="warning",
        why="models and optimizers of two versions may differ",
        fix=lambda host, usual: f"{host.software.pip_install} keras=={usual}",
    )  # fmt: skip


def _check_backend(host: HostFacts) -> Findings:
    found = host.tensorflow
    if _numbers(found.keras) < (3, 0) or not found.keras_backend:
        return
    if found.keras_backend not in _TRAINS:
        yield ClusterFinding(
            f"Keras on {host.name} has the backend {found.keras_backend}",
            "it cannot train: farandole.horovod.keras takes tensorflow, torch and jax",
            "export KERAS_BACKEND=torch",
            "warning",
            host.name,
        )
    elif found.keras_backend == "tensorflow" and not found.version:
        yield ClusterFinding(
            f"Keras on {host.name} has the backend tensorflow, which is not installed",
            "import keras fails there",
            f"export KERAS_BACKEND=torch    (or {host.software.pip_install} "
            f"{'tensorflow' if host.resources.gpus else 'tensorflow-cpu'})",
            "warning",
            host.name,
        )


def _check_legacy(host: HostFacts) -> Findings:
    found = host.tensorflow
    if found.uses_legacy_keras and not found.tf_keras:
        yield ClusterFinding(
            f"{host.name} has TF_USE_LEGACY_KERAS set, and no tf-keras",
            "tf.keras is Keras 2 of the package tf-keras then, and importing it fails",
            f"unset TF_USE_LEGACY_KERAS    (or {host.software.pip_install} --no-deps tf-keras)",
            "warning",
            host.name,
        )
    elif found.tf_keras and found.version and _numbers(found.tf_keras) != _numbers(found.version):
        minor = ".".join(map(str, _numbers(found.version)))
        yield ClusterFinding(
            f"{host.name} has tf-keras {found.tf_keras} with TensorFlow {found.version}",
            "tf-keras fits TensorFlow of the same minor version only",
            f"{host.software.pip_install} --no-deps 'tf-keras=={minor}.*'",
            "warning" if found.uses_legacy_keras else "note",
            host.name,
        )


def _fitting(host: HostFacts) -> str:
    """Return which of the installed distributions fits the host: those for CPUs have no code for GPUs."""
    names = list(host.tensorflow.tensorflow)
    return next((name for name in names if name.endswith("-cpu") != bool(host.resources.gpus)), names[0])


def _pip(host: HostFacts) -> str:
    return host.software.pip_install.removesuffix(" install")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; () where it is unknown, which is older than any."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if len(parts) == 2 and all(map(str.isdecimal, parts)) else ()
