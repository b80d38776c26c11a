"""Devices and networks as their makers and published measurements describe them. Nothing here was measured by us.

Rates of hardware are data-sheet figures, dense, one direction. What collectives reach of a link is the share that
published measurements reached of theirs; docs/cluster-file.md names the source of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from .coefficient import Coefficient


class Range(NamedTuple):
    """A figure and the interval that publications give for it."""

    value: float
    low: float
    high: float

    def times(self, scale: float) -> Coefficient:
        """Return it as a preset, `scale` times as large."""
        value, low, high = (float(f"{scale * each:.6g}") for each in self)
        return Coefficient(value, "preset", low, high)


def exactly(value: float) -> Coefficient:
    """Return a preset without an interval."""
    return Coefficient(float(f"{value:.6g}"), "preset")


EFFICIENCY = ((1e8, Range(0.10, 0.05, 0.60)), (1e9, Range(0.60, 0.10, 0.90)), (16e9, Range(0.90, 0.60, 0.95)),
              (128e9, Range(0.95, 0.90, 1.0)))  # fmt: skip
"""Share of the peak by floating-point operations of one matrix product: Calculon's table for A100-80GB.

It has steps: 0.10 below 1 GFLOP, then 0.60, 0.90 from 16, 0.95 from 128 (`systems/a100_80g.json`, SC'23). A point
here is where a step begins.
"""
MEMORY_SHARE = Range(0.90, 0.60, 0.95)
"""Share of the memory's peak, from the same table: 0.60 from 1 MB, 0.75 from 10 MB, 0.90 from 100 MB."""
CODEC_PASSES = {"none": 0.0, "bf16": 3.0, "int8": 4.0, "int4": 5.0, "powersgd:rank=4": 6.0}
"""How often a codec's encoding and decoding read or write the gradient's bytes; "none" of the CPU sums: 1.5."""
_LAUNCH = Range(7e-6, 4e-6, 12e-6)
_OVERLAP = Range(1.13, 1.0, 1.3)
_TCP_CAP = Range(2.65e9, 1.8e9, 3.5e9)
_RDMA_SHARE = Range(0.75, 0.67, 0.85)
_RDMA_HOP = Range(14e-6, 2.7e-6, 20e-6)
_NVLINK_HOP = Range(3.4e-6, 0.6e-6, 8e-6)


@dataclass(frozen=True)
class DevicePreset:
    """One rank's device, and how ranks of a host reach each other."""

    title: str
    memory_bytes: float
    """Without about 1 GB for the driver's context."""
    memory_bytes_per_second: float
    peaks: Mapping[str, float]
    """Floating-point operations per second by precision; of "fp32" without TF32, which torch leaves off."""
    host_line: float | None
    """Bytes per second and direction between a rank and the others of its host."""
    host_rate: Range
    """Bytes per second that a rank sends in a collective inside the host."""
    host_latency: Range
    launch_seconds: Range = _LAUNCH
    """The floor of one kernel in AutoParallel's cost model."""
    overlap: Range = _OVERLAP
    """Slow-down of computation and of exchanges while both run; Galvatron's measured 1.126, its range to 1.3."""
    tcp_cap: Range = _TCP_CAP
    """Bytes per second that a rank moves over TCP, however fast the line is."""
    is_cpu: bool = False
    efficiency: tuple[tuple[float, Range], ...] = EFFICIENCY
    ranks_per_host: int = 8


@dataclass(frozen=True)
class NetworkPreset:
    """One network interface of a host."""

    title: str
    bits_per_second: float
    is_tcp: bool
    share: Range = _RDMA_SHARE
    """What collectives reach of the line: 0.75 on two DGX A100 over RoCE."""
    latency: Range = _RDMA_HOP
    """What one round takes: a hop over the network in NCCL's model, as torch 2.13 has it."""


def _tcp(name: str, gigabits: float, latency: Range) -> NetworkPreset:
    return NetworkPreset(name, gigabits * 1e9, True, Range(0.89, 0.80, 0.956), latency)


DEVICES: Mapping[str, DevicePreset] = MappingProxyType({
    "a100": DevicePreset(
        "NVIDIA A100-SXM 80 GB", 84e9, 2.039e12, {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
        300e9, Range(217e9, 200e9, 235e9), _NVLINK_HOP,
    ),
    "a100-40": DevicePreset(
        "NVIDIA A100-SXM 40 GB", 41.4e9, 1.555e12, {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
        300e9, Range(217e9, 200e9, 235e9), _NVLINK_HOP,
    ),
    "h100": DevicePreset(
        "NVIDIA H100-SXM 80 GB", 84e9, 3.35e12, {"fp32": 66.9e12, "bf16": 989e12, "fp16": 989e12},
        450e9, Range(370e9, 330e9, 400e9), _NVLINK_HOP,
    ),
    "h200": DevicePreset(
        "NVIDIA H200-SXM 141 GB", 149e9, 4.8e12, {"fp32": 66.9e12, "bf16": 989e12, "fp16": 989e12},
        450e9, Range(370e9, 330e9, 400e9), _NVLINK_HOP,
    ),
    "v100": DevicePreset(
        "NVIDIA V100-SXM2 32 GB", 33e9, 0.9e12, {"fp32": 15.7e12, "fp16": 125e12},
        150e9, Range(112e9, 100e9, 130e9), _NVLINK_HOP,
    ),
    "rtx-4090": DevicePreset(
        "NVIDIA GeForce RTX 4090, 24 GB", 24.4e9, 1.008e12,
        {"fp32": 82.6e12, "bf16": 165.2e12, "fp16": 165.2e12}, 31.5e9, Range(10e9, 5e9, 20e9),
        Range(8e-6, 4e-6, 15e-6),
    ),
    "l40s": DevicePreset(
        "NVIDIA L40S, 48 GB", 46.8e9, 0.864e12, {"fp32": 91.6e12, "bf16": 362e12, "fp16": 362e12}, 31.5e9,
        Range(10e9, 5e9, 20e9), Range(8e-6, 4e-6, 15e-6),
    ),
    "cpu": DevicePreset(
        "4 cores with AVX2 at 3 GHz", 8e9, 10e9, {"fp32": 384e9}, None, Range(2.4e9, 1e9, 5e9),
        Range(20e-6, 5e-6, 60e-6), launch_seconds=Range(3e-6, 1e-6, 10e-6), overlap=Range(1.15, 1.0, 1.5),
        tcp_cap=Range(1.075e9, 0.7e9, 1.5e9), is_cpu=True,
        efficiency=((1e5, Range(0.05, 0.01, 0.2)), (1e7, Range(0.4, 0.2, 0.7)), (1e9, Range(0.6, 0.4, 0.85))),
        ranks_per_host=1,
    ),
})  # fmt: skip
NETWORKS: Mapping[str, NetworkPreset] = MappingProxyType({
    "1gbe": _tcp("1 Gbit/s Ethernet, TCP", 1, Range(60e-6, 25e-6, 120e-6)),
    "10gbe": _tcp("10 Gbit/s Ethernet, TCP", 10, Range(40e-6, 15e-6, 80e-6)),
    "25gbe": _tcp("25 Gbit/s Ethernet, TCP", 25, Range(30e-6, 12e-6, 60e-6)),
    "100gbe": _tcp("100 Gbit/s Ethernet, TCP", 100, Range(30e-6, 12e-6, 60e-6)),
    "200gbe": _tcp("200 Gbit/s Ethernet, TCP", 200, Range(30e-6, 12e-6, 60e-6)),
    "400gbe": _tcp("400 Gbit/s Ethernet, TCP", 400, Range(30e-6, 12e-6, 60e-6)),
    "100roce": NetworkPreset("100 Gbit/s Ethernet, RoCE", 100e9, False),
    "200roce": NetworkPreset("200 Gbit/s Ethernet, RoCE", 200e9, False),
    "400roce": NetworkPreset("400 Gbit/s Ethernet, RoCE", 400e9, False),
    "edr-ib": NetworkPreset("100 Gbit/s EDR InfiniBand", 100e9, False),
    "hdr-ib": NetworkPreset("200 Gbit/s HDR InfiniBand", 200e9, False),
    "ndr-ib": NetworkPreset("400 Gbit/s NDR InfiniBand", 400e9, False),
})  # fmt: skip
SYSTEMS: Mapping[str, str] = MappingProxyType({
    "dgx-a100": "8xa100+8xhdr-ib",
    "dgx-h100": "8xh100+8xndr-ib",
    "dgx-h200": "8xh200+8xndr-ib",
    "dgx-v100": "8xv100+4xedr-ib",
})  # fmt: skip
"""Hosts that are sold by name: ranks, device, interfaces and network."""
