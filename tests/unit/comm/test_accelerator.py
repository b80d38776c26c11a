"""The seam to accelerators: what it asks of torch, by a kind that stands in, and that a CPU answers nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farandole.comm.device import accelerator
from farandole.comm.device.accelerator import DeviceMemory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class KindStandIn:
    """What torch's module of a kind does, with two devices."""

    def __init__(self) -> None:
        self.default_generators = (torch.Generator(), torch.Generator())
        self.limits: list[tuple[float, torch.device]] = []
        self.used = True

    def init(self) -> None:
        """Begin to use it."""
        self.used = True

    def is_initialized(self) -> bool:
        """Return whether it is used."""
        return self.used

    def get_device_name(self, device: torch.device) -> str:
        """Return its model."""
        return f"model {device.index}"

    def get_device_properties(self, device: torch.device) -> Any:
        """Return its id, among others."""
        return SimpleNamespace(uuid=f"id-{device.index}")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Return free and all bytes."""
        return 600 + (device.index or 0), 1000

    def set_per_process_memory_fraction(self, share: float, device: torch.device) -> None:
        """Note a limit."""
        self.limits.append((share, device))

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return the states of all."""
        return [each.get_state() for each in self.default_generators]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Set the states of all."""
        for each, state in zip(self.default_generators, states, strict=True):
            each.set_state(state)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> KindStandIn:
    made, current = KindStandIn(), [0]

    def set_index(device: torch.device | int) -> None:
        current[0] = device if isinstance(device, int) else int(device.index)

    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    answers: dict[str, Callable[..., Any]] = {
        "current_accelerator": lambda **_: torch.device("cuda"),
        "device_count": lambda: 2,
        "memory_reserved": lambda device: 300 + device.index,
        "memory_allocated": lambda device: 200 + device.index,
        "max_memory_allocated": lambda device: 250 + device.index,
        "current_device_index": lambda: current[0],
        "set_device_index": set_index,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    return made


def test_a_kind_says_what_it_is_and_has(kind: KindStandIn) -> None:
    assert accelerator.accelerators() == ("cuda", 2)
    assert accelerator.gpu_count() == 2
    assert accelerator.local_gpu(3) == GPU
    assert accelerator.backend_of(GPU) == "nccl"
    assert accelerator.model_of(GPU) == "model 1"
    assert accelerator.unique_id(GPU) == "id-1"
    assert accelerator.memory_of(GPU) == DeviceMemory(free=601, total=1000, reserved=301, allocated=201)
    assert accelerator.peak_bytes(GPU) == 251
    assert accelerator.limit_memory(GPU, 250)
    assert accelerator.limit_memory(GPU, 5000)
    assert kind.limits == [(0.25, GPU), (1.0, GPU)]


def test_the_device_of_before_is_this_thread_s_again(kind: KindStandIn) -> None:
    with accelerator.same_device(GPU):
        accelerator.set_device(GPU)
        assert accelerator.current_index() == 1
    assert accelerator.current_index() == 0


def test_generators_of_a_kind_are_read_and_set(kind: KindStandIn) -> None:
    kind.used = False
    assert accelerator.random_states() == []
    assert not accelerator.is_in_use()
    generator = accelerator.generator_of(GPU)
    assert generator is kind.default_generators[1]
    assert accelerator.generator_of(torch.device("cuda")) is kind.default_generators[0]
    assert accelerator.is_in_use(), "a generator is asked for after its kind is begun"
    states = accelerator.random_states()
    first = torch.rand(3, generator=generator, dtype=torch.float64)
    accelerator.set_random_states(states)
    assert torch.equal(torch.rand(3, generator=generator, dtype=torch.float64), first)


def test_a_kind_that_says_little_is_asked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    assert accelerator.memory_of(GPU) is None
    assert accelerator.peak_bytes(GPU) is None
    assert not accelerator.limit_memory(GPU, 1)
    assert accelerator.generator_of(GPU) is None
    assert accelerator.unique_id(GPU) == ""


def test_only_gpus_are_taken_unasked(kind: KindStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert accelerator.accelerators() == ("mps", 2)
    assert accelerator.gpu_count() == 0
    assert accelerator.local_gpu(0) is None
    assert accelerator.backend_of(torch.device("mps")) == "", "gloo carries no memory of it"
    assert accelerator.backend_of(torch.device("xpu")) == "xccl"


@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
def test_a_cpu_answers_nothing(device: torch.device) -> None:
    assert not accelerator.is_accelerator(device)
    accelerator.synchronize(device)
    accelerator.synchronize_stream(device)
    accelerator.set_device(device)
    with accelerator.same_device(device):
        pass
    assert accelerator.model_of(device) == accelerator.unique_id(device) == accelerator.backend_of(device) == ""
    answers = [accelerator.memory_of(device), accelerator.peak_bytes(device), accelerator.generator_of(device)]
    assert answers == [None, None, None]
    assert not accelerator.limit_memory(device, 1)


def test_torch_has_the_names() -> None:
    names = [name for name in vars(KindStandIn) if not name.startswith("_")]
    for name in [*names, "default_generators", "_sleep", "get_sync_debug_mode", "set_sync_debug_mode", "nccl"]:
        assert hasattr(torch.cuda, name)
