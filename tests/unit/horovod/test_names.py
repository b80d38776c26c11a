"""Every public name of `horovod.torch` is there, with the parameters that programs give it."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

import farandole.horovod.torch as hvd
from farandole.core.rank_variables import RANK_LAUNCHERS
from farandole.horovod.common import basics, process_sets
from farandole.horovod.torch import mpi_ops

SCALES = "prescale_factor=1.0, postscale_factor=1.0"
IN_SET = "process_set=<all>"
REDUCE = f"average=None, name=None, op=None, {SCALES}, {IN_SET}"
COMPRESSED = f"average=None, name=None, compression=<none>, op=None, {SCALES}, {IN_SET}"

SIGNATURES = {
    "allreduce_async": f"tensor, {REDUCE}",
    "allreduce": f"tensor, {COMPRESSED}",
    "allreduce_async_": f"tensor, {REDUCE}",
    "allreduce_": f"tensor, {REDUCE}",
    "grouped_allreduce_async": f"tensors, {REDUCE}",
    "grouped_allreduce": f"tensors, {COMPRESSED}",
    "grouped_allreduce_async_": f"tensors, {REDUCE}",
    "grouped_allreduce_": f"tensors, {REDUCE}",
    "sparse_allreduce_async": f"tensor, name, op, {IN_SET}",
    "allgather_async": f"tensor, name=None, {IN_SET}",
    "allgather": f"tensor, name=None, {IN_SET}",
    "grouped_allgather_async": f"tensors, name=None, {IN_SET}",
    "grouped_allgather": f"tensors, name=None, {IN_SET}",
    "broadcast_async": f"tensor, root_rank, name=None, {IN_SET}",
    "broadcast": f"tensor, root_rank, name=None, {IN_SET}",
    "broadcast_async_": f"tensor, root_rank, name=None, {IN_SET}",
    "broadcast_": f"tensor, root_rank, name=None, {IN_SET}",
    "alltoall_async": f"tensor, splits=None, name=None, {IN_SET}",
    "alltoall": f"tensor, splits=None, name=None, {IN_SET}",
    "reducescatter_async": f"tensor, name=None, op=0, {IN_SET}, {SCALES}",
    "reducescatter": f"tensor, name=None, compression=<none>, op=0, {IN_SET}, {SCALES}",
    "grouped_reducescatter_async": f"tensors, name=None, op=0, {IN_SET}, {SCALES}",
    "grouped_reducescatter": f"tensors, name=None, compression=<none>, op=0, {IN_SET}, {SCALES}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": IN_SET,
    "init": "*args, **kwargs",
    "shutdown": "*args, **kwargs",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {IN_SET}",
    "allgather_object": "obj, name=None",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "_check_has_gpu": "",
    **dict.fromkeys(
        (
            "is_initialized", "size", "local_size", "cross_size", "rank", "local_rank", "cross_rank",
            "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built",
            "ddl_built", "ccl_built", "cuda_built", "rocm_built",
        ),
        "",
    ),
}  # fmt: skip

FORWARDS = {
    "HorovodAllreduce": "tensor, average, name, op, prescale_factor, postscale_factor, process_set",
    "HorovodGroupedAllreduce": "average, name, op, prescale_factor, postscale_factor, process_set, *tensors",
    "HorovodAllgather": "tensor, name, process_set",
    "HorovodGroupedAllgather": "name, process_set, *tensors",
    "HorovodBroadcast": "tensor, root_rank, name, process_set",
    "HorovodAlltoall": "tensor, splits, name, process_set",
    "HorovodReducescatter": "tensor, name, op, process_set, prescale_factor, postscale_factor",
    "HorovodGroupedReducescatter": "name, op, process_set, prescale_factor, postscale_factor, *tensors",
}


def parameters(function: Any) -> str:
    """Return the parameters of a function as the tables above write them."""
    shown = []
    for each in inspect.signature(function).parameters.values():
        stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        text = stars + each.name
        if each.default is hvd.global_process_set:
            text += "=<all>"
        elif each.default is hvd.Compression.none:
            text += "=<none>"
        elif each.default is not each.empty:
            text += f"={each.default!r}"
        shown.append(text)
    return ", ".join(shown)


def test_signatures() -> None:
    assert {name: parameters(getattr(hvd, name)) for name in SIGNATURES} == SIGNATURES
    for name in SIGNATURES:
        if not name.startswith("_"):
            assert getattr(hvd, name).__doc__, name
            assert name in hvd.__all__
            assert getattr(mpi_ops, name, None) is getattr(hvd, name) or hasattr(
                sys.modules["farandole.horovod.torch.functions"], name
            ), name


@pytest.mark.parametrize("name", FORWARDS)
def test_autograd_functions(name: str) -> None:
    forward = parameters(getattr(mpi_ops, name).forward).removeprefix("ctx, ")
    assert forward.startswith(FORWARDS[name])  # what may follow has a default
    assert "=" in forward.removeprefix(FORWARDS[name]) or forward == FORWARDS[name]


def test_other_names() -> None:
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)
    assert {type(each) for each in (hvd.Average, hvd.Product)} == {int}
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert hvd.DistributedSampler is torch.utils.data.distributed.DistributedSampler
    assert isinstance(hvd.global_process_set, hvd.ProcessSet)
    assert hvd.global_process_set.process_set_id == 0
    assert parameters(hvd.ProcessSet) == "ranks_or_comm"
    for name in ("_basics", "_handle_map", "is_homogeneous"):
        assert hasattr(mpi_ops, name)
    assert parameters(basics.HorovodBasics.init) == "self, comm=None, process_sets=None"
    assert process_sets.global_process_set is hvd.global_process_set
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        hvd.nothing_of_that_name  # noqa: B018


def test_importing_horovod_imports_no_torch() -> None:
    code = (
        "import sys, farandole.horovod as horovod, farandole.horovod.common.util, farandole.horovod.data;"
        "import farandole.horovod.common.exceptions, farandole.horovod.common.process_sets;"
        "assert 'torch' not in sys.modules; print(horovod.__version__)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.startswith("0.28.1+farandole.")


def test_names_that_are_imported_from_where_horovod_imports_them_itself() -> None:
    for module, names in {
        "common.elastic": "WorkerNotificationManager notification_manager",
        "torch": "check_extension",
        "torch.mpi_ops": "num_rank_is_power_2 gpu_available get_average_backwards_compatibility_fun "
        "check_installed_version handle_average_backwards_compatibility",
        "torch.functions": "allgather broadcast broadcast_async_ synchronize rank size ProcessSet",
        "torch.optimizer": "Compression allreduce_async_ grouped_allreduce_async_ sparse_allreduce_async "
        "synchronize rank size Average Adasum Sum rocm_built split_list ProcessSet global_process_set",
        "torch.sync_batch_norm": "allgather_async allreduce_async synchronize Sum rank size",
        "runner.launch": "run_commandline",
        "runner.common.util.env": "get_env_rank_and_size",
    }.items():
        found = importlib.import_module(f"farandole.horovod.{module}")
        assert [name for name in names.split() if not hasattr(found, name)] == [], module


def test_rank_and_size_before_init(monkeypatch: pytest.MonkeyPatch) -> None:
    env = importlib.import_module("farandole.horovod.runner.common.util.env")
    for launcher in RANK_LAUNCHERS:
        assert launcher.ranks is not None
        for name in (*launcher.ranks.rank, *launcher.ranks.size):
            monkeypatch.delenv(name, raising=False)
    assert env.get_env_rank_and_size() == (0, 1)
    for name, value in (("RANK", "3"), ("SIZE", "5"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    assert env.get_env_rank_and_size() == (3, 5)


def test_the_version_of_horovodrun() -> None:
    command = [sys.executable, "-m", "farandole.horovod.runner", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0.28.1\n"
