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


Efficiency = tuple[tuple[float, Range], ...]
"""Share of the peak by floating-point operations of one matrix product."""


def _reached(*points: tuple[float, float], best: float) -> Efficiency:
    """Return shares at sizes of products; `best`: the highest of all. In training they may be 0.8 of these."""
    top = max(share for _, share in points)
    return tuple((flops, Range(share, 0.8 * share, share * best / top)) for flops, share in points)


_FP32 = ((1e8, 0.25), (1e9, 0.65), (1e10, 0.95))
"""What float32 without tensor cores reaches, over that of large products: an estimate, none was published."""


def _fp32(best: float) -> Efficiency:
    most = min(1.0, 1.1 * best)
    return tuple(
        (flops, Range(share * best, 0.6 * share * best, min(most, 2.0 * share * best))) for flops, share in _FP32
    )


CODEC_PASSES = {"none": 0.0, "bf16": 3.0, "int8": 4.0, "int4": 5.0, "powersgd:rank=4": 6.0}
"""How often a codec's encoding and decoding read or write the gradient's bytes; "none" of the CPU sums: 1.5."""
_LAUNCH = Range(10e-6, 5e-6, 25e-6)
_OVERLAP = Range(1.13, 1.0, 1.3)
_MEMORY_SHARE = Range(0.80, 0.50, 0.92)
_TCP_CAP = Range(2.65e9, 1.8e9, 3.5e9)
_TCP_OF_A_LINE = Range(5e9, 3.5e9, 6e9)
"""Bytes per second of an interface by TCP, however fast its line is: NCCL on 100 Gbit/s."""
_RDMA_SHARE = Range(0.80, 0.60, 0.96)
_RDMA_HOP = Range(14e-6, 2.7e-6, 40e-6)
_NVLINK_HOP = Range(6e-6, 3.4e-6, 12e-6)
_A100 = _reached((1e9, 0.25), (2.1e9, 0.38), (17e9, 0.71), (137e9, 0.76), (1.1e12, 0.81), best=0.87)
_H100 = _reached(
    (1.1e9, 0.15), (2.1e9, 0.22), (4.3e9, 0.39), (17e9, 0.65), (137e9, 0.74), (2.1e12, 0.70), best=0.80
)  # fmt: skip
_B200 = _reached((1.1e9, 0.07), (2.1e9, 0.16), (17e9, 0.47), (137e9, 0.63), best=0.78)


@dataclass(frozen=True)
class DevicePreset:
    """One rank's device, and how ranks of a host reach each other."""

    title: str
    memory_bytes: float
    """Without about 1 GB for the driver's context."""
    memory_bytes_per_second: float
    peaks: Mapping[str, float]
    """Floating-point operations per second by precision; of "fp32" without TF32, which torch leaves off."""
    efficiency: Mapping[str, Efficiency]
    """By precision, what matrix products reach of it."""
    host_line: float | None
    """Bytes per second and direction between a rank and the others of its host."""
    host_rate: Range
    """Bytes per second that a rank sends in a collective inside the host."""
    host_latency: Range
    attention: Range | None = None
    """FLOPs per second of attention in one kernel in 16 bits, forward and backward; None: none was published."""
    memory_share: Range = _MEMORY_SHARE
    """What operations reach of the memory's rate: copies of much 0.72 to 0.92; less where they move few bytes."""
    pair_rate: Range | None = None
    """What two ranks reach where each pair of a host has a link of its own."""
    launch_seconds: Range = _LAUNCH
    """What the host takes to start one operation."""
    overlap: Range = _OVERLAP
    """Slow-down of computation and of exchanges while both run; Galvatron's measured 1.126, its range to 1.3."""
    tcp_cap: Range = _TCP_CAP
    """Bytes per second that a rank moves over TCP, however fast the line is."""
    ranks_per_host: int = 8

    @property
    def is_cpu(self) -> bool:
        """Whether ranks of a host reach each other in its memory."""
        return self.host_line is None


@dataclass(frozen=True)
class NetworkPreset:
    """One network interface of a host."""

    title: str
    bits_per_second: float
    is_tcp: bool
    share: Range = _RDMA_SHARE
    """What collectives reach of the line: 0.80 on four hosts of 8 H100 over RoCE."""
    latency: Range = _RDMA_HOP
    """What one round takes: a hop over the network in NCCL's model, as torch 2.13 has it."""


def _tcp(gigabits: float, share: Range, latency: Range) -> NetworkPreset:
    line = gigabits * 1e9 / 8
    reached = Range(*(min(each, cap / line) for each, cap in zip(share, _TCP_OF_A_LINE, strict=True)))
    return NetworkPreset(f"{gigabits:g} Gbit/s Ethernet, TCP", gigabits * 1e9, True, reached, latency)


def _short(efficiency: Efficiency, fp32: float) -> Mapping[str, Efficiency]:
    return {"fp32": _fp32(fp32), "bf16": efficiency, "fp16": efficiency}


def _peaks(fp32: float, short: float) -> Mapping[str, float]:
    return {"fp32": fp32 * 1e12, "bf16": short * 1e12, "fp16": short * 1e12}


_PCIE = (31.5e9, Range(10e9, 5e9, 20e9), Range(8e-6, 4e-6, 15e-6))
DEVICES: Mapping[str, DevicePreset] = MappingProxyType({
    "a100": DevicePreset(
        "NVIDIA A100-SXM 80 GB", 84e9, 2.039e12, _peaks(19.5, 312), _short(_A100, 0.98),
        300e9, Range(200e9, 179e9, 232e9), _NVLINK_HOP, attention=Range(165e12, 110e12, 190e12),
    ),
    "a100-40": DevicePreset(
        "NVIDIA A100-SXM 40 GB", 41.4e9, 1.555e12, _peaks(19.5, 312), _short(_A100, 0.98),
        300e9, Range(200e9, 179e9, 232e9), _NVLINK_HOP, attention=Range(165e12, 110e12, 190e12),
    ),
    "h100": DevicePreset(
        "NVIDIA H100-SXM 80 GB", 84e9, 3.35e12, _peaks(66.9, 989), _short(_H100, 0.78),
        450e9, Range(350e9, 300e9, 430e9), _NVLINK_HOP, attention=Range(340e12, 220e12, 500e12),
    ),
    "h200": DevicePreset(
        "NVIDIA H200-SXM 141 GB", 149e9, 4.8e12, _peaks(66.9, 989), _short(_H100, 0.77),
        450e9, Range(350e9, 300e9, 430e9), _NVLINK_HOP, attention=Range(340e12, 220e12, 530e12),
    ),
    "b200": DevicePreset(
        "NVIDIA B200-SXM 180 GB", 190e9, 7.7e12, _peaks(75, 2250), _short(_B200, 0.88),
        900e9, Range(650e9, 560e9, 730e9), Range(10e-6, 6e-6, 12.5e-6), attention=Range(700e12, 300e12, 1100e12),
    ),
    "gb200": DevicePreset(
        "NVIDIA GB200, one of an NVL72, 186 GB", 197e9, 8.0e12, _peaks(80, 2500), _short(_B200, 0.88),
        900e9, Range(600e9, 560e9, 720e9), Range(5e-6, 4e-6, 12e-6), attention=Range(800e12, 310e12, 1200e12),
        memory_share=Range(0.70, 0.50, 0.83), ranks_per_host=72,
    ),
    "mi300x": DevicePreset(
        "AMD MI300X, 192 GB", 204e9, 5.3e12, _peaks(163.4, 1307),
        _short(_reached((1e9, 0.06), (2.1e9, 0.12), (137e9, 0.42), (1.1e12, 0.51), best=0.54), 0.59),
        448e9, Range(314e9, 300e9, 317e9), Range(9e-6, 5e-6, 13e-6), attention=Range(200e12, 100e12, 310e12),
        memory_share=Range(0.78, 0.50, 0.85), pair_rate=Range(47.7e9, 45e9, 48e9),
    ),
    "v100": DevicePreset(
        "NVIDIA V100-SXM2 32 GB", 33e9, 0.9e12, {"fp32": 15.7e12, "fp16": 125e12},
        {"fp32": _fp32(0.92),
         "fp16": _reached((1e9, 0.30), (2.1e9, 0.46), (17e9, 0.63), (137e9, 0.77), best=0.80)},
        150e9, Range(112e9, 100e9, 130e9), _NVLINK_HOP,
    ),
    "rtx-4090": DevicePreset(
        "NVIDIA GeForce RTX 4090, 24 GB", 24.4e9, 1.008e12, _peaks(82.6, 165.2),
        _short(_reached((1e9, 0.60), (2.1e9, 0.77), (17e9, 0.92), best=1.0), 0.67), *_PCIE,
        attention=Range(120e12, 95e12, 150e12),
    ),
    "l40s": DevicePreset(
        "NVIDIA L40S, 48 GB", 46.8e9, 0.864e12, _peaks(91.6, 362),
        _short(_reached((1e9, 0.27), (2.1e9, 0.35), (17e9, 0.55), (137e9, 0.70), best=0.75), 0.51), *_PCIE,
        attention=Range(120e12, 95e12, 200e12),
    ),
    "cpu": DevicePreset(
        "4 cores with AVX2 at 3 GHz", 8e9, 10e9, {"fp32": 384e9},
        {"fp32": ((1e5, Range(0.05, 0.01, 0.2)), (1e7, Range(0.4, 0.2, 0.7)), (1e9, Range(0.6, 0.4, 0.85)))},
        None, Range(2.4e9, 1e9, 5e9), Range(20e-6, 5e-6, 60e-6),
        memory_share=Range(0.90, 0.60, 0.95), launch_seconds=Range(3e-6, 1e-6, 10e-6),
        overlap=Range(1.15, 1.0, 1.5), tcp_cap=Range(1.075e9, 0.7e9, 1.5e9), ranks_per_host=1,
    ),
})  # fmt: skip
_WIRE, _FASTER = Range(0.89, 0.80, 0.956), Range(0.60, 0.40, 0.90)
"""What TCP reaches of a line: gloo of 1 Gbit/s; NCCL's sockets of 32 Gbit/s and more."""
_NEAR = Range(30e-6, 12e-6, 60e-6)
NETWORKS: Mapping[str, NetworkPreset] = MappingProxyType({
    "1gbe": _tcp(1, _WIRE, Range(60e-6, 25e-6, 120e-6)),
    "10gbe": _tcp(10, _WIRE, Range(40e-6, 15e-6, 80e-6)),
    "25gbe": _tcp(25, Range(0.75, 0.50, 0.92), _NEAR),
    **{f"{gigabits}gbe": _tcp(gigabits, _FASTER, _NEAR) for gigabits in (40, 50, 100, 200, 400)},
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
    "dgx-b200": "8xb200+8xndr-ib",
    "gb200-nvl72": "72xgb200+72xndr-ib",
    "dgx-v100": "8xv100+4xedr-ib",
})  # fmt: skip
"""Hosts that are sold by name: ranks, device, interfaces and network. All GPUs of an NVL72 count as one host."""
