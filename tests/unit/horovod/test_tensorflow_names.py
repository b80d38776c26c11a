"""Every name of `horovod.tensorflow`, `.tensorflow.keras` and `.keras` is there, with Horovod's parameters."""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.ranks.keras_jobs import finish, needs_tensorflow, start_module

C, IN_SET = "compression=<none>", "process_set=<all>"
DEVICES = "device_dense='', device_sparse=''"
SCALES = "prescale_factor=1.0, postscale_factor=1.0"
NAMED = "name=None, ignore_name_scope=False"
LOCAL = "scale_local_gradients=True"
GROUPS = "num_groups=0, groups=None"
PASSES = "backward_passes_per_step=1, average_aggregated_gradients=False"
OF_TAPE = f"{DEVICES}, {C}, sparse_as_dense=False, op=0, gradient_predivide_factor=1.0, {GROUPS}, {IN_SET}"
OF_KERAS = f"optimizer, name=None, {DEVICES}, {C}, sparse_as_dense=False, gradient_predivide_factor=1.0, op=0"
IN_LAYER = {
    "PartialDistributedOptimizer": f"{OF_KERAS}, {PASSES}, groups=None, {IN_SET}, local_layers=None, {LOCAL}",
    "broadcast_global_variables": "root_rank",
    "allreduce": f"value, name=None, average=None, {SCALES}, op=None, {C}",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=0",
    "load_model": f"filepath, custom_optimizers=None, custom_objects=None, {C}, legacy_opts=False",
}
QUESTIONS = dict.fromkeys(
    (
        "is_initialized", "size", "local_size", "cross_size", "rank", "local_rank", "cross_rank", "is_homogeneous",
        "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built",
        "ddl_built", "ccl_built", "cuda_built", "rocm_built", "stop_timeline",
    ),
    "",
)  # fmt: skip
TIMELINE = {"start_timeline": "file_path, mark_cycles=False"}
SETS = dict.fromkeys(("add_process_set", "remove_process_set"), "process_set") | {"ProcessSet": "ranks_or_comm"}
CALLBACKS = {
    "BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "MetricAverageCallback": "device=''",
    "LearningRateScheduleCallback": "initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, "
    "momentum_correction=True, steps_per_epoch=None",
    # Horovod 0.28 wants initial_lr; guides for older versions leave it out.
    "LearningRateWarmupCallback": "initial_lr=None, warmup_epochs=5, momentum_correction=True, "
    "steps_per_epoch=None, verbose=0",
    "BestModelCheckpoint": "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', "
    "save_freq='epoch'",
}
ELASTIC = {
    "KerasState": "model, optimizer=None, **kwargs",
    "run": "func",
    "CommitStateCallback": "state, batches_per_commit=1",
    "UpdateBatchStateCallback": "state",
    "UpdateEpochStateCallback": "state",
}
SIGNATURES: dict[str, dict[str, str]] = {
    "tensorflow": {
        **QUESTIONS,
        **TIMELINE,
        **SETS,
        "init": "*args, **kwargs",
        "shutdown": "*args, **kwargs",
        "check_num_rank_power_of_2": "num_rank",
        "handle_average_backwards_compatibility": "op, average",
        "gpu_available": "ext_base_name, verbose=False",
        "check_extension": "ext_name, ext_env_var, pkg_path, *args",
        "split_list": "l, n",
        "vars_to_refs": "vars",
        "refs_to_vars": "refs",
        **dict.fromkeys(("rank_op", "local_rank_op", "local_size_op"), "name=None"),
        **dict.fromkeys(("size_op", "process_set_included_op"), "process_set_id=0, name=None"),
        "allreduce": f"tensor, average=None, {DEVICES}, {C}, op=None, {SCALES}, name=None, {IN_SET}, "
        "ignore_name_scope=False",
        "grouped_allreduce": f"tensors, average=None, {DEVICES}, {C}, op=None, {SCALES}, {IN_SET}, "
        "ignore_name_scope=False, name=None",
        "allgather": f"tensor, {NAMED}, {IN_SET}",
        "grouped_allgather": f"tensors, {NAMED}, {IN_SET}",
        "broadcast": f"tensor, root_rank, {NAMED}, {IN_SET}",
        "broadcast_": f"variables, root_rank, name=None, {IN_SET}",
        "alltoall": f"tensor, splits=None, {NAMED}, {IN_SET}",
        "reducescatter": f"tensor, device_dense='', {C}, op=0, name=None, {IN_SET}, ignore_name_scope=False, "
        f"{SCALES}",
        "grouped_reducescatter": f"tensors, device_dense='', {C}, op=0, {IN_SET}, {SCALES}",
        "join": "",
        "broadcast_variables": f"variables, root_rank, {IN_SET}, inplace=False",
        "broadcast_global_variables": "root_rank",
        "BroadcastGlobalVariablesHook": "root_rank, device=''",
        "broadcast_object": f"obj, root_rank=0, session=None, name=None, {IN_SET}",
        "broadcast_object_fn": f"root_rank=0, session=None, name=None, {IN_SET}",
        "allgather_object": f"obj, session=None, name=None, {IN_SET}",
        "DistributedOptimizer": f"optimizer, name=None, use_locking=False, {DEVICES}, {C}, sparse_as_dense=False, "
        "backward_passes_per_step=1, op=0, gradient_predivide_factor=1.0, average_aggregated_gradients=False, "
        f"{GROUPS}, {IN_SET}, {LOCAL}",
        "DistributedGradientTape": f"gradtape, {OF_TAPE}, {LOCAL}",
        "PartialDistributedGradientTape": f"gradtape, {OF_TAPE}, local_layers=None, {LOCAL}",
        "SyncBatchNormalization": "fused=False, **kwargs",
    },
    "tensorflow.elastic": {
        "run": "func",
        "TensorFlowKerasState": "model, optimizer=None, backend=None, **kwargs",
        "TensorFlowState": "variables=None, session=None, **kwargs",
    },
    "tensorflow.keras": {
        **QUESTIONS,
        **TIMELINE,
        **SETS,
        **IN_LAYER,
        "DistributedOptimizer": f"{OF_KERAS}, {PASSES}, {GROUPS}, {IN_SET}, {LOCAL}",
    },
    "tensorflow.keras.callbacks": CALLBACKS,
    "tensorflow.keras.elastic": ELASTIC,
    "keras": {**QUESTIONS, **TIMELINE, **SETS, **IN_LAYER, "DistributedOptimizer": f"{OF_KERAS}, {GROUPS}"},
    "keras.callbacks": CALLBACKS,
    "keras.elastic": ELASTIC,
    "tape": {
        "gradient": "self, target, sources, output_gradients=None, use_generic_names=False",
        "register_local_source": "self, source",
        "get_local_and_global_gradients": "self, target, sources, output_gradients=None, use_generic_names=False",
    },
    "optimizer": {
        "register_local_var": "self, var",
        "compute_gradients": "self, loss, var_list, tape=None",
        "_compute_gradients": "self, loss, var_list, grad_loss=None, tape=None",
        "get_gradients": "self, loss, params",
        "_aggregate_gradients": "self, grads_and_vars",
    },
}
"""Module, name and parameters as in Horovod; <none> is Compression.none, <all> the set of all ranks."""
OTHERS = {
    "tensorflow": "Average Sum Adasum Min Max Product Compression global_process_set util mpi_ops elastic",
    "tensorflow.keras": "Average Sum Compression callbacks elastic global_process_set",
    "keras": "Average Sum Adasum Compression callbacks elastic",
}
"""Names without parameters."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str | None]]:
    """Return what one process has found, whichever workers ask."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    results = folder / "tensorflow_signatures.json"
    with (folder / "tensorflow_signatures.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            finish(start_module("tests.unit.horovod.tensorflow_signatures", results), results)
        found: dict[str, dict[str, str | None]] = json.loads(results.read_text())
    return found


@pytest.mark.full("slow")
@needs_tensorflow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", SIGNATURES)
def test_signatures(module: str, told: dict[str, dict[str, str | None]]) -> None:
    assert {name: told[module].get(name, "missing") for name in SIGNATURES[module]} == SIGNATURES[module]


@pytest.mark.full("slow")
@needs_tensorflow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", OTHERS)
def test_other_names(module: str, told: dict[str, dict[str, str | None]]) -> None:
    assert set(OTHERS[module].split()) <= set(told[module])


def test_mxnet_is_one_clear_error() -> None:
    with pytest.raises(ImportError) as found:
        importlib.import_module("farandole.horovod.mxnet")
    assert str(found.value) == (
        "horovod.mxnet: Apache MXNet was retired in 2023 and has no release for this Python; farandole has no "
        "front end for it. Use horovod.torch, horovod.tensorflow or horovod.keras."
    )


def import_with(monkeypatch: pytest.MonkeyPatch, package: Any, **distributions: str) -> Any:
    """Import the module that looks for TensorFlow, where this package and these distributions are installed."""

    def version(name: str) -> str:
        found = distributions.get(name.replace("-", "_"))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setitem(sys.modules, "tensorflow", package)
    monkeypatch.setattr(importlib.metadata, "version", version)
    return load("tensorflow/installed.py", "farandole.horovod.tensorflow.installed_here").tf


def load(file: str, name: str) -> Any:
    """Import one file of the front ends by itself: their packages need TensorFlow or Keras."""
    front_end = importlib.util.find_spec("farandole.horovod")
    assert front_end is not None
    assert front_end.origin is not None
    spec = importlib.util.spec_from_file_location(name, Path(front_end.origin).parent / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake(version: str | None) -> ModuleType:
    module = ModuleType("tensorflow")
    if version is not None:
        module.__version__ = version  # type: ignore[attr-defined]
    return module


def test_tensorflow_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"not installed; pip install -e \S+\[tensorflow\]"):
        import_with(monkeypatch, None)
    with pytest.raises(
        ImportError, match=r"TensorFlow 2\.15\.1 is installed, expected 2\.16 or newer; pip install"
    ):
        import_with(monkeypatch, fake("2.15.1"), tensorflow="2.15.1")
    with pytest.raises(ImportError, match=r"no package, and the folder is incomplete; pip install"):
        import_with(monkeypatch, fake(None))
    good = fake("2.21.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert import_with(monkeypatch, good, tensorflow_cpu="2.21.0") is good


def test_two_distributions_of_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"tensorflow": "2.21.0", "tensorflow_cpu": "2.20.0"}
    remedy = "pip uninstall tensorflow tensorflow-cpu, then install one: pip install"
    with pytest.warns(RuntimeWarning, match=rf"tensorflow 2\.21\.0 and tensorflow-cpu 2\.20\.0 are .* {remedy}"):
        import_with(monkeypatch, fake("2.21.0"), **both)
    with pytest.raises(ImportError, match=rf"the folder is incomplete; {remedy}"):
        import_with(monkeypatch, fake(None), **both)


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("jax", ModuleNotFoundError("No module named 'jax'", name="jax")),
        ("numpy", ModuleNotFoundError("No module named 'jax'", name="jax")),
        ("openvino", ModuleNotFoundError("No module named 'openvino'", name="openvino")),
        ("mine", ValueError("Unable to import backend : mine")),
    ],
)
def test_a_backend_of_keras_that_cannot_train(
    monkeypatch: pytest.MonkeyPatch, backend: str, problem: Exception
) -> None:
    def fail(_: str) -> None:
        raise problem

    backends = load("keras/layer/backends.py", "farandole.horovod.keras.layer.backends_here")
    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    with pytest.raises(
        ImportError, match=rf"Keras on {backend} is not supported.* set KERAS_BACKEND to tensorflow"
    ):
        backends.import_keras("keras", "keras")


def test_keras_on_jax_is_refused_where_jax_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = load("keras/layer/backends.py", "farandole.horovod.keras.layer.backends_here")
    monkeypatch.setattr(importlib, "import_module", lambda _: "keras")
    for backend in ("tensorflow", "torch"):
        monkeypatch.setattr(backends, "backend_name", lambda backend=backend: backend)
        assert backends.import_keras("keras", "keras") == "keras"
    monkeypatch.setattr(backends, "backend_name", lambda: "jax")
    with pytest.raises(
        ImportError, match="Keras on jax is not supported: set KERAS_BACKEND to tensorflow or torch"
    ):
        backends.import_keras("keras.callbacks", "keras")
    assert backends.import_keras("tf_keras", "keras") == "keras", "which has one backend"


def test_keras_without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")

    backends = load("keras/layer/backends.py", "farandole.horovod.keras.layer.backends_here")
    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    expected = "Keras runs on tensorflow, which is not installed: pip install tensorflow or tensorflow-cpu, or set"
    with pytest.raises(ImportError, match=expected):
        backends.import_keras("keras", "keras")
