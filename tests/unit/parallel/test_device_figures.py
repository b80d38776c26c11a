"""What samples say of an accelerator: by NVML, by torch without it, and nothing on a CPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from farandole.comm.device.accelerator import DeviceMemory
from farandole.comm.world.world import World
from farandole.core.vocabulary.events import Sample, StepDone
from farandole.observe.records.host_sampler import HostSampling
from farandole.parallel.instrument import device_marks as device_figures
from farandole.parallel.instrument.device_marks import figures_of

MEMORY = DeviceMemory(free=30, total=100, reserved=60, allocated=50)


class NvmlStandIn:
    """What is used of nvidia-ml-py, for one GPU."""

    class NVMLError(Exception):
        """Its error."""

    def __init__(self, *, is_known: bool) -> None:
        self.is_known, self.is_open = is_known, False

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        """Begin."""
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802 - NVML's name
        """End."""
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, name: bytes) -> bytes:  # noqa: N802 - NVML's name
        """Return what stands for a GPU."""
        if not self.is_known or name != b"GPU-1234":
            raise self.NVMLError
        return name

    def nvmlDeviceGetUtilizationRates(self, handle: bytes) -> Any:  # noqa: N802 - NVML's name
        """Return percents."""
        return SimpleNamespace(gpu=85, memory=20)

    def nvmlDeviceGetMemoryInfo(self, handle: bytes) -> Any:  # noqa: N802 - NVML's name
        """Return bytes."""
        return SimpleNamespace(used=72, total=100)


def sample_on(kind: str, monkeypatch: pytest.MonkeyPatch, nvml: NvmlStandIn | None) -> Sample:
    """Return a sample of a rank whose device is of a kind."""
    has_memory = kind == "cuda"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: importing it raises ImportError
    monkeypatch.setattr(device_figures, "unique_id", lambda device: "1234" if has_memory else "")
    monkeypatch.setattr(device_figures, "memory_of", lambda device: MEMORY if has_memory else None)
    taken: list[Any] = []
    here = cast("World", SimpleNamespace(device=torch.device(kind, 0)))
    sampling = HostSampling(taken.append, figures_of(here), every_seconds=0.0)
    sampling.record(StepDone(1, 1e12))
    sampling.close()
    (found,) = [each for each in taken if isinstance(each, Sample)]
    return found


def test_nvml_says_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = NvmlStandIn(is_known=True)
    sample = sample_on("cuda", monkeypatch, nvml)
    assert (sample.gpu_share, sample.gpu_used_bytes, sample.gpu_total_bytes) == (0.85, 72, 100)
    assert not nvml.is_open


@pytest.mark.parametrize("nvml", [None, NvmlStandIn(is_known=False)])
def test_without_it_torch_says_the_memory(nvml: NvmlStandIn | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sample_on("cuda", monkeypatch, nvml)
    assert (sample.gpu_share, sample.gpu_used_bytes, sample.gpu_total_bytes) == (None, 70, 100)


def test_a_cpu_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sample_on("cpu", monkeypatch, NvmlStandIn(is_known=True))
    assert (sample.gpu_share, sample.gpu_used_bytes, sample.gpu_total_bytes) == (None, None, None)
