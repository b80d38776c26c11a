"""The helpers of `horovod.common.util`, and the errors."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
from contextlib import nullcontext

import pytest

from farandole.core.vocabulary.errors import CommError, Mismatch, PeerLost, Stalled
from farandole.horovod.common import exceptions, util


def test_env_sets_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_OF_ENV_A", "before")

    def inside() -> None:
        with util.env(TEST_OF_ENV_A="inside", TEST_OF_ENV_B="new", TEST_OF_ENV_C=None):
            assert os.environ["TEST_OF_ENV_A"] == "inside"
            assert os.environ["TEST_OF_ENV_B"] == "new"
            assert "TEST_OF_ENV_C" not in os.environ
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert os.environ["TEST_OF_ENV_A"] == "before"
    assert "TEST_OF_ENV_B" not in os.environ


@pytest.mark.parametrize(
    ("length", "parts", "expected"),
    [(10, 3, [4, 3, 3]), (5, 5, [1, 1, 1, 1, 1]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])],
)
def test_split_list(length: int, parts: int, expected: list[int]) -> None:
    split = util.split_list(list(range(length)), parts)
    assert [len(part) for part in split] == expected
    assert [each for part in split for each in part] == list(range(length))


def test_num_rank_is_power_2() -> None:
    assert [n for n in range(-2, 20) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]


def test_extensions() -> None:
    assert util.EXTENSIONS == ["tensorflow", "torch", "mxnet"]
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet")
    assert not util.extension_available("fortran")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)
    with pytest.raises(ImportError, match=r"horovod\.mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)


def test_a_gpu_is_there_where_torch_sees_one() -> None:
    import torch

    assert util.gpu_available("torch") == torch.cuda.is_available()


def test_versions() -> None:
    import torch

    util.check_installed_version("torch", torch.__version__)
    with pytest.warns(UserWarning, match=r"torch .* is installed, but torch 0\.1 was expected"):
        util.check_installed_version("torch", "0.1")
    cause = RuntimeError("cause")
    with pytest.raises(exceptions.HorovodVersionMismatchError) as caught:
        util.check_installed_version("nothing-of-this-name", "0.1", cause)
    assert caught.value.__cause__ is cause
    assert (caught.value.name, caught.value.version, caught.value.installed_version) == (
        "nothing-of-this-name",
        "0.1",
        "none",
    )


@pytest.mark.parametrize(
    ("version", "installed", "same"),
    [
        ("2.14.1+cu130", "2.14.1", True),
        ("2.14.1", "2.14.1+cu130", True),
        ("2.14.1+cpu", "2.14.1+cu130", False),
        ("2.14.1+cu130", "2.14.0", False),
    ],
)
def test_a_build_that_its_package_does_not_name_is_the_same_version(
    monkeypatch: pytest.MonkeyPatch, version: str, installed: str, same: bool
) -> None:
    # PyPI's torch for CUDA names its build in torch.__version__ alone.
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    with nullcontext() if same else pytest.warns(UserWarning, match="was expected"):
        util.check_installed_version("torch", version)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Mismatch, exceptions.HorovodMismatchError),
        (PeerLost, exceptions.HorovodPeerLostError),
        (Stalled, exceptions.HorovodStalledError),
        (CommError, exceptions.HorovodInternalError),
    ],
)
def test_errors_of_the_engine(ours: type[CommError], theirs: type[Exception]) -> None:
    error = exceptions.from_comm_error(ours("no answer", rank=3, operation="allreduce x", remedy="look at rank 2"))
    assert type(error) is theirs
    assert isinstance(error, exceptions.HorovodInternalError)
    assert isinstance(error, RuntimeError)
    assert str(error) == "rank 3, allreduce x: no answer; look at rank 2"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_hosts_updated() -> None:
    error = exceptions.HostsUpdatedInterrupt(True)
    assert isinstance(error, RuntimeError)
    assert error.skip_sync is True
    assert not isinstance(error, exceptions.HorovodInternalError)
