"""Figures of devices and links as seconds: attention, sizes of products, the host, meshes, copies of shards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farandole.core.cluster import Cluster, Coefficient, ComputeRate
from farandole.core.cluster_presets import preset_cluster
from farandole.core.vocabulary.spec import Plan
from farandole.plan.candidate import Candidate
from farandole.plan.cost.gradients import sharded_units
from farandole.plan.cost.layout import RunLayout
from farandole.plan.cost.predict import predict
from farandole.plan.cost.rates import PassWork, Rates, Spent
from farandole.plan.cost.stages import StageUnits
from farandole.plan.cost.units import pass_of
from farandole.plan.search.bounds import pass_seconds
from farandole.plan.search.result import with_faster_link
from tests.unit.plan.cost.cases import cluster_of, transformer

LAUNCH_SECONDS, MEMORY = 5e-6, 2e10


def accelerator(*, attention: float | None = 4e10, slowdown: float = 1.0, speed: float = 1e15) -> Cluster:
    cluster = cluster_of(2, 4, name="gpu", bytes_per_second=(speed,), latency_seconds=0.0)
    rates = {} if attention is None else {"bf16": Coefficient(attention, "preset", attention / 2, 2 * attention)}
    sizes = (ComputeRate(1e6, Coefficient(1e11)), ComputeRate(1e8, Coefficient(4e11)))
    device = replace(cluster.device, attention_flops_per_second=rates, compute={"fp32": sizes, "bf16": sizes})
    return replace(cluster, device=device, compute_slowdown=Coefficient(slowdown))


def test_attention_has_a_rate_of_its_own_and_products_that_of_their_own_size() -> None:
    rates = Rates(accelerator())
    spent = rates.unit_pass(PassWork(4e8, 0.0, 8.0, products=4.0, fused_flops=6e8), "bf16")
    assert spent.seconds == pytest.approx(4e8 / 4e11 + 6e8 / 4e10), "4 products of 1e8, and attention"
    assert spent.features == {
        "device.compute.bf16.1.flops_per_second": 4e8,
        "device.attention_flops_per_second.bf16": 6e8,
        "device.memory_bytes_per_second": 0.0,
    }
    unknown = rates.unit_pass(PassWork(4e6, 0.0, 4.0, products=0.0), "bf16")
    assert unknown.seconds == pytest.approx(4e6 / 1e11), "older profiles: all operations are products"


def test_attention_without_a_figure_is_a_product_of_its_size_and_intervals_are_used() -> None:
    assert Rates(accelerator()).attention(1e8, "fp16").seconds == pytest.approx(1e8 / 4e10), "16 bits are alike"
    assert Rates(accelerator()).attention(1e8, "fp32").seconds == pytest.approx(1e8 / 4e11), "fp32 has none"
    without, on_cpus = Rates(accelerator(attention=None)), Rates(cluster_of(2, 4))
    assert without.attention(1e8, "bf16").seconds == pytest.approx(1e8 / 4e11)
    assert [each.partition(":")[0] for each in without.assumed] == [
        "device.attention_flops_per_second has no bf16"
    ], "a plan says so"
    assert on_cpus.attention(1e8, "bf16").seconds == pytest.approx(1e8 / 2e11)
    assert not on_cpus.assumed
    assert Rates(accelerator(), "best").attention(1e8, "bf16").seconds == pytest.approx(1e8 / 8e10)
    assert Rates(accelerator(), "worst").attention(1e8, "bf16").seconds == pytest.approx(1e8 / 2e10)


@pytest.mark.parametrize(("moved", "expected"), [(2e6, 40 * LAUNCH_SECONDS), (2e8, 2e8 / MEMORY)])
def test_the_host_starts_operations_while_an_accelerator_computes(moved: float, expected: float) -> None:
    work = PassWork(0.0, moved, 40.0, products=0.0)
    assert Rates(accelerator()).unit_pass(work, "fp32").seconds == pytest.approx(expected)
    assert Rates(cluster_of(2, 4)).unit_pass(work, "fp32").seconds == pytest.approx(
        40 * LAUNCH_SECONDS + moved / MEMORY
    ), "a CPU starts and computes, one after the other"


def test_backward_of_attention_computes_scores_again() -> None:
    profile = transformer(layers=2, hidden=128, sequence=64, heads=8)
    layer = profile.units[1]
    fused = 0.25 * layer.forward_flops
    layer = replace(
        layer, products=4, operations=4, moved_bytes=0.0, gradients=(), fused_flops=fused,
        fused_backward_flops=2.5 * fused,
    )  # fmt: skip
    profile = replace(profile, units=(profile.units[0], layer, profile.units[2]))
    cluster = accelerator()
    plan = Candidate(Plan(precision="bf16", bf16_parameters=True), 4, 400)
    layout = RunLayout.of(plan, 2, on_device=True)
    made = pass_of(layer, profile, layout, Rates(cluster))
    assert made.forward.features["device.attention_flops_per_second.bf16"] == pytest.approx(100 * fused)
    assert made.backward.features["device.attention_flops_per_second.bf16"] == pytest.approx(250 * fused)
    products = sum(count for name, count in made.backward.features.items() if name.startswith("device.compute"))
    assert products == pytest.approx(100 * (layer.backward_flops - 2.5 * fused))
    assert made.weight_share == pytest.approx((layer.forward_flops - fused) / layer.backward_flops)


def test_pairs_of_a_mesh_have_their_own_links() -> None:
    cluster = preset_cluster("mi300x+ndr-ib", 16)
    rates, pair = Rates(cluster), 47.7e9
    speeds = [
        rates.link("all_gather", ranks, stride).bytes_per_second for ranks, stride in ((2, 1), (2, 4), (4, 2))
    ]
    assert speeds == pytest.approx([pair, pair, 3 * pair])
    assert rates.link("send", 8, 1).bytes_per_second == pair, "a message goes over one link"
    across = Rates(preset_cluster("8xmi300x+8xndr-ib", 32)).link("all_gather", 8, 4)
    assert across.bytes_per_second == pytest.approx(pair), "two ranks of each host pass on by their link"
    assert rates.link("all_gather", 8, 1).bytes_per_second == 314e9
    assert Rates(preset_cluster("h100", 8)).link("all_gather", 2, 1).bytes_per_second == 350e9
    spent, link = rates.exchange("all_gather", 2, 1, 2e9), rates.link("all_gather", 2, 1)
    assert spent.features["tiers.0.pair_bytes_per_second"] == pytest.approx(1e9)
    faster = Rates(with_faster_link(preset_cluster("mi300x", 8), 2.0)).link("all_gather", 4, 1)
    assert faster.bytes_per_second == pytest.approx(6 * pair)
    assert spent.seconds == pytest.approx(link.latency_seconds + 1e9 / pair)


def test_gathering_across_hosts_is_a_ring_by_presets() -> None:
    cluster = preset_cluster("dgx-h100", 1024)
    (host, network), rates = (tier.collectives["all_gather"] for tier in cluster.tiers), Rates(cluster)
    hop, far = host.latency_seconds.value, network.latency_seconds.value
    ring = rates.exchange("all_gather", 1024, 1, 0.0)
    assert ring.seconds == pytest.approx(128 * 3 * hop + 127 * far)
    assert ring.features["tiers.0.collectives.all_gather.latency_seconds"] == 128 * 3
    assert ring.features["tiers.1.collectives.all_gather.latency_seconds"] == 127
    copies = rates.exchange("reduce_scatter", 128, 8, 0.0)
    assert copies.seconds == pytest.approx(127 * far), "one rank of each host"
    assert rates.exchange("all_reduce", 1024, 1, 0.0).seconds == pytest.approx(20 * far), "trees"
    assert rates.exchange("all_gather", 8, 1, 0.0).seconds == pytest.approx(3 * hop), (
        "inside a host as it was fitted"
    )
    measured = replace(network, latency_seconds=Coefficient(far, "measured"))
    tiers = (cluster.tiers[0], replace(cluster.tiers[1], collectives={"all_gather": measured}))
    assert Rates(replace(cluster, tiers=tiers)).exchange("all_gather", 1024, 1, 0.0).seconds == pytest.approx(
        10 * far
    )


def test_units_of_shards_are_copied_on_accelerators() -> None:
    profile = transformer(layers=4, hidden=128, sequence=64, heads=8)
    plan = Candidate(Plan(zero=3, precision="bf16"), 4, 400)
    root, block = sharded_units(
        profile, StageUnits([(0, 1), (1, 4), (2, 1)]), RunLayout.of(plan, 2, on_device=True)
    )
    assert block.gathered_bytes < block.nbytes, "gradients are as wide as what was gathered, and travel in 4 bytes"
    moved = 4 * (4 * block.gathered_bytes + block.gathered_bytes + block.nbytes)
    moved += 2 * root.gathered_bytes + root.gathered_bytes + root.nbytes
    terms = [predict(profile, each, plan).terms["shard"] for each in (accelerator(), cluster_of(
        2, 4, bytes_per_second=(1e15,), latency_seconds=0.0
    ))]  # fmt: skip
    assert terms[0] == pytest.approx(moved / MEMORY, rel=1e-3), "each message is read and written once"
    assert terms[1] < 0.01 * terms[0], "on CPUs this is in what was measured"


def test_a_plan_says_that_attention_was_not_measured() -> None:
    profile = transformer()
    fused = replace(profile.units[1], fused_flops=0.1 * profile.units[1].forward_flops)
    attending = replace(profile, units=(profile.units[0], fused, profile.units[2]))
    plan = Candidate(Plan(precision="bf16"), 8, 64)
    said = [
        next(each for each in predict(each, preset_cluster("a100", 8), plan).warnings if each.startswith("preset"))
        for each in (profile, attending)
    ]
    assert ["attention" in each for each in said] == [False, True]


def test_computing_is_slower_while_shards_travel() -> None:
    profile = transformer(layers=4, hidden=128, sequence=64, heads=8)
    plan = Candidate(Plan(zero=3), 4, 4000)
    usual, slow = (
        predict(profile, accelerator(slowdown=each, speed=1e9), plan).terms["shard"] for each in (1.0, 1.5)
    )
    root, block = sharded_units(
        profile, StageUnits([(0, 1), (1, 4), (2, 1)]), RunLayout.of(plan, 2, on_device=True)
    )
    # Blocks are gathered twice beside computing; sums of all but the last block travel beside backward.
    beside = 0.75 * (4 * 2 * block.gathered_bytes + 3 * block.nbytes) / 1e9
    assert slow - usual == pytest.approx((1 - 1 / 1.5) * beside, rel=0.01)
    assert root.is_root


def test_rows_that_are_gathered_beside_forward_slow_it() -> None:
    profile = transformer(layers=4, hidden=128, sequence=64, heads=8)
    plan = Candidate(Plan(zero=1, overlap_gather=True), 4, 4000)
    usual, slow = (
        predict(profile, accelerator(slowdown=each, speed=1e9), plan).terms.get("shard", 0.0)
        for each in (1.0, 1.5)
    )
    assert usual < slow, "what is hidden still slows the computation"


@pytest.mark.parametrize(("exchange", "total"), [(1.0, 1.13), (0.5, 1.0 + 0.13 * 0.5), (2.0, 1.13 + 1.0)])
def test_both_are_slower_while_both_run(exchange: float, total: float) -> None:
    slower = Coefficient(1.13)
    cluster = replace(accelerator(), compute_slowdown=slower, exchange_slowdown=slower)
    assert 1.0 + Rates(cluster).beside(Spent(exchange), 1.0).seconds == pytest.approx(total)


@pytest.mark.parametrize("kinds", [("bf16",), ("fp16",)])
def test_no_plan_is_faster_than_the_least_of_its_passes(kinds: tuple[str, ...]) -> None:
    """A floor has the rates of the prediction, whose precision stands for another too."""
    plain = accelerator()
    rate = plain.device.attention_flops_per_second["bf16"]
    fast = dict.fromkeys(kinds, replace(rate, value=1e15, low=None, high=None))
    layer = transformer().units[1]
    attending = replace(
        layer, products=1, moved_bytes=0.0, operations=0, gradients=(), fused_flops=layer.forward_flops,
        fused_backward_flops=layer.backward_flops,
    )  # fmt: skip
    one_precision = replace(plain.device, compute={"fp16": plain.device.compute["fp32"]})
    for device in (
        replace(plain.device, attention_flops_per_second=fast),
        one_precision,
        preset_cluster("v100", 4).device,
    ):
        cluster = replace(plain, device=device)
        profile = replace(transformer(), units=(attending,))
        layout = RunLayout.of(Candidate(Plan(precision="bf16"), 4, 4), 2, on_device=True)
        made = pass_of(attending, profile, layout, Rates(cluster))
        least = pass_seconds(attending, cluster, "bf16")
        assert least[0] <= made.forward.seconds * (1 + 1e-9)
        assert least[1] <= made.backward.seconds * (1 + 1e-9)


def test_experts_in_float32_leave_attention_alone() -> None:
    layer = replace(
        transformer().units[1], forward_flops=1e9, backward_flops=2e9, fused_flops=2e8, fused_backward_flops=4e8,
        uncast_flops=6e8, products=4, operations=4, moved_bytes=0.0, gradients=(), tensor=None,
    )  # fmt: skip
    profile = replace(transformer(), units=(layer,))
    cluster = accelerator()
    cluster = replace(cluster, device=replace(cluster.device, compute=dict(
        cluster.device.compute, fp32=(ComputeRate(1e6, Coefficient(1e10)),)
    )))  # fmt: skip
    layout = RunLayout.of(Candidate(Plan(precision="bf16"), 4, 4), 2, on_device=True)
    made = pass_of(layer, profile, layout, Rates(cluster))
    for spent, scale in ((made.forward, 1), (made.backward, 2)):
        assert spent.features["device.attention_flops_per_second.bf16"] == pytest.approx(scale * 2e8)
        assert spent.features["device.compute.fp32.0.flops_per_second"] == pytest.approx(scale * 6e8)
        assert spent.seconds == pytest.approx(scale * (2e8 / 4e10 + 6e8 / 1e10 + 2e8 / 4e11))


def test_rings_of_context_are_products_on_accelerators() -> None:
    profile = transformer(layers=2, hidden=128, sequence=64, heads=8)
    layer = replace(profile.units[1], fused_flops=1e6, fused_backward_flops=2e6)
    plan = Plan(precision="bf16", context=2, context_kind="ring")
    layout = RunLayout.of(Candidate(plan, 4, 400), 2, on_device=True)
    rates, path = Rates(accelerator()), "device.attention_flops_per_second.bf16"
    assert path not in pass_of(layer, profile, layout, rates).forward.features
    assert any("rings" in each for each in rates.assumed)
    heads = RunLayout.of(Candidate(replace(plan, context_kind="heads"), 4, 400), 2, on_device=True)
    assert pass_of(layer, profile, heads, rates).forward.features[path] > 0
