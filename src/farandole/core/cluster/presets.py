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

from ..vocabulary.codec_spec import CodecSpec
from ..vocabulary.errors import ConfigError
from ..vocabulary.suggestions import nearest
from .cluster import OPERATIONS, Cluster, CodecCost, CollectiveCost, ComputeRate, Device, Tier
from .coefficient import Coefficient
from .preset_tables import (
    CODEC_PASSES,
    DEVICES,
    NETWORKS,
    SYSTEMS,
    DevicePreset,
    NetworkPreset,
    Range,
    exactly,
)
from .resize import check_hosts

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
