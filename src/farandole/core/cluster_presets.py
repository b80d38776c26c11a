"""Clusters by name, from published figures: to plan for machines that are not there yet.

Every figure of a preset has the source "preset": it was never measured on the machines that a plan is for, and a
prediction that rests on it says so.

>>> [tier.ranks for tier in preset_cluster("4xrtx-4090+25gbe", 16).tiers]
[4, 16]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from .cluster import (
    OPERATIONS,
    Cluster,
    CodecCost,
    Coefficient,
    CollectiveCost,
    ComputeRate,
    Device,
    Tier,
    check_hosts,
    with_ranks,
)
from .cluster_file import read_cluster
from .vocabulary.codec_spec import CodecSpec
from .vocabulary.errors import ConfigError
from .vocabulary.text import nearest

# Devices and networks as their makers and published measurements describe them. Nothing here was measured by us.
#
# Rates of hardware are data-sheet figures, dense, one direction. What collectives reach of a link is the share
# that published measurements reached of theirs; docs/plan/internals.md names the source of each.


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


_COUNTED = re.compile(r"(?:([1-9][0-9]{0,5})x)?(.*?)(?:x([1-9][0-9]{0,5}))?")
_IN_16_BITS = ("bf16", "fp16")
_RANKS_OF_A_HOST = 16
"""The most without a network."""
_MATRIX = 1024
"""Rows and columns for which the ratio of a low-rank codec is given; predictions use the shapes of the model."""
_SUM_PASSES = 1.5


@dataclass(frozen=True)
class PresetName:
    """What the name of a preset says."""

    text: str
    device: str
    ranks_per_host: int | None
    network: str | None
    interfaces: int


def preset_cluster(name: str, ranks: int) -> Cluster:
    """Return the cluster of a preset with `ranks` ranks.

    Args:
        name: a system ("dgx-a100"), a device ("rtx-4090": one host), or a device and a network ("a100+hdr-ib").
            With numbers: ranks of a host and its network interfaces, as in "4xrtx-4090+2x25gbe"; "h100x8" is
            "8xh100".
        ranks: of the whole cluster.

    Raises:
        ConfigError: for an unknown name, with the nearest; for ranks that do not fill whole hosts.
    """
    parsed = parse_preset(name)
    device = DEVICES[parsed.device]
    network = None if parsed.network is None else NETWORKS[parsed.network]
    most = device.ranks_per_host
    per_host = parsed.ranks_per_host or (most if network is not None else max(_RANKS_OF_A_HOST, most))
    if network is None and ranks > per_host:
        raise ConfigError(
            f"preset {name!r} is one host, of up to {per_host} ranks, not {ranks}",
            remedy=f"name the network between hosts: {name}+25gbe",
        )
    check_hosts(ranks, per_host, f"preset {name!r}")
    tiers = [_host_tier(device, min(ranks, per_host))]
    if network is not None and ranks > per_host:
        tiers.append(_network_tier(device, network, per_host, parsed.interfaces, ranks))
    title = device.title + (f"; {parsed.interfaces} x {network.title} a host" if network is not None else "")
    return Cluster(
        name=name,
        device=_device(device),
        tiers=tuple(tiers),
        codecs=codecs_by_passes(device.memory_share.value * device.memory_bytes_per_second, is_cpu=device.is_cpu),
        compute_slowdown=device.overlap.times(1.0),
        exchange_slowdown=device.overlap.times(1.0),
        fingerprint={
            "preset": name,
            "hardware": title,
            "backend": "gloo" if device.is_cpu else "nccl",
            **({} if network is None else {"network": network.title}),
        },
    )


def parse_preset(name: str) -> PresetName:
    """Read the name of a preset; `ConfigError` with the nearest name for an unknown one."""
    text = SYSTEMS.get(name.strip().lower(), name.strip().lower())
    device_text, plus, network_text = text.partition("+")
    ranks_per_host, device = _counted(device_text)
    if device not in DEVICES:
        raise _unknown(name, "preset" if not plus else "device of a preset", device, [*DEVICES, *SYSTEMS])
    if not plus:
        return PresetName(name, device, ranks_per_host, None, 1)
    interfaces, network = _counted(network_text)
    if network not in NETWORKS:
        raise _unknown(name, "network of a preset", network, list(NETWORKS))
    return PresetName(name, device, ranks_per_host, network, interfaces or 1)


def _counted(text: str) -> tuple[int | None, str]:
    found = _COUNTED.fullmatch(text.strip())
    assert found is not None, "every text matches"
    if found[1] and found[3]:  # which of both?
        return None, text.strip()
    count = found[1] or found[3]
    return (int(count) if count else None), found[2].strip()


def _unknown(name: str, kind: str, part: str, known: list[str]) -> ConfigError:
    close = nearest(part, known)
    listed = f"devices: {', '.join(DEVICES)}; systems: {', '.join(SYSTEMS)}; networks: {', '.join(NETWORKS)}"
    inside = "" if part == name else f" in {name!r}"
    return ConfigError(
        f"unknown {kind} {part!r}{inside}", remedy=(f"did you mean {close!r}? " if close else "") + listed
    )


def _device(preset: DevicePreset) -> Device:
    compute = {
        precision: tuple(ComputeRate(flops, share.times(peak)) for flops, share in preset.efficiency[precision])
        for precision, peak in preset.peaks.items()
    }
    attention = {} if preset.attention is None else dict.fromkeys(_IN_16_BITS, preset.attention.times(1.0))
    return Device(
        name=preset.title,
        memory_bytes=exactly(preset.memory_bytes),
        memory_bytes_per_second=preset.memory_share.times(preset.memory_bytes_per_second),
        launch_seconds=preset.launch_seconds.times(1.0),
        compute=compute,
        attention_flops_per_second=attention,
        peak_flops_per_second=dict(preset.peaks),
    )


def _host_tier(preset: DevicePreset, ranks: int) -> Tier:
    line = None if preset.host_line is None else exactly(preset.host_line)
    costs = _collectives(preset.host_latency.times(1.0), preset.host_rate.times(1.0))
    pair = None if preset.pair_rate is None else preset.pair_rate.times(1.0)
    return Tier("host", ranks, costs, line, pair)


def _network_tier(
    device: DevicePreset, network: NetworkPreset, per_host: int, interfaces: int, ranks: int
) -> Tier:
    """Return the tier between hosts: a rank has its part of the host's interfaces."""
    line = network.bits_per_second / 8 * interfaces / per_host
    rate = Range(*(line * share for share in network.share))
    if network.is_tcp:
        rate = Range(*(min(reached, cap) for reached, cap in zip(rate, device.tcp_cap, strict=True)))
    return Tier("network", ranks, _collectives(network.latency.times(1.0), rate.times(1.0)), exactly(line))


def _collectives(latency: Coefficient, rate: Coefficient) -> Mapping[str, CollectiveCost]:
    return {operation: CollectiveCost(latency, rate) for operation in OPERATIONS}


def codecs_by_passes(memory_bytes_per_second: float, *, is_cpu: bool) -> dict[str, CodecCost]:
    """Return codecs as passes over memory: they do little else. An estimate, never measured."""
    costs: dict[str, CodecCost] = {}
    for text, passes in CODEC_PASSES.items():
        spec = CodecSpec.parse(text)
        seconds = (_SUM_PASSES if is_cpu and passes == 0 else passes) / memory_bytes_per_second
        element_bytes = spec.bytes_per_element(_MATRIX, _MATRIX) or 4.0
        costs[text] = CodecCost(
            Range(seconds, 0.5 * seconds, 3 * seconds).times(1.0), float(f"{element_bytes / 4.0:.6g}"), spec.rounds
        )
    return costs


# A cluster by what a user writes after ``--cluster``: a file, or the name of a preset.

_FILES = (".toml", ".json")


def find_machines(text: str, ranks: int) -> Cluster:
    """Return the cluster of a file with the ranks that it was measured with, or of a preset with `ranks`.

    Raises as `find_cluster`, for ranks that the machines cannot have too: `with_ranks` resizes what is returned.
    """
    if not _is_file(text):
        return find_cluster(text, ranks)
    cluster = find_cluster(text)
    with_ranks(cluster, ranks)
    return cluster


def find_cluster(text: str, ranks: int | None = None) -> Cluster:
    """Return the cluster of a file or a preset, with `ranks` ranks (default: those of the file).

    Raises `ConfigError` for a file that is not there or cannot be read, an unknown preset, a preset without
    a number of ranks, and ranks that do not fill whole hosts.
    """
    if _is_file(text):
        cluster = read_cluster(Path(text))
        return cluster if ranks is None else with_ranks(cluster, ranks)
    parse_preset(text)
    if ranks is None:
        raise ConfigError(f"preset {text!r} has no number of ranks of its own", remedy="say how many: --gpus 16")
    return preset_cluster(text, ranks)


def _is_file(text: str) -> bool:
    path = Path(text)
    return path.suffix in _FILES or "/" in text or path.is_file()
