"""A pass of one unit: what it computes and what its ranks exchange for it, with one micro-batch.

[Note: types under autocast] Under `precision = "bf16"` linear layers give 16 bits, and norms and residuals stay
float32. So sums of tensor parallel have 2 bytes forward and 4 backward, and what travels between stages has 4.
With `bf16_parameters` all of them have 2.

[Note: ranks that vary] An exchange ends with its slowest rank. Where passes were timed, each unit that exchanges
waits for the largest of as many times, drawn independently: e_N of their standard deviations above the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ...core.link import largest_normal
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.rules import MOST_ZERO
from ..candidate import CollectiveCalls, Term
from ..profile import AttentionFacts, ModelProfile, ModelUnit, TensorFacts
from .layout import RunLayout, divided_gradients
from .rates import PassWork, Rates, Spent

_BACKWARD_MOVED = 2.0
"""What backward reads and writes, over forward: for each operation gradients of its input and of its weights."""
_BACKWARD_ATTENTION = 2.5
"""Matrix products of attention in backward over those in forward, where scores are computed again: 5 over 2.
Dao et al. 2022, "FlashAttention", section 3."""
_CAST_MOVED = 2.0
"""What autocast reads and writes of weights, over reading them: float32 is read, 16 bits are written and read."""
_ACCUMULATED = 3.0
"""What adding a gradient to that of earlier passes moves, over its bytes: both are read, and one is written."""
_SHARD_STARTS = (90, 120)
"""What the host does for a unit of stage 3, in starts of an operation, forward and backward: FSDP2 gathers, copies
and scatters by Python and many small operations. Measured in torch 2.13 on two cores, 24 units on one rank: see
docs/plan/internals.md."""
_COUNT_BYTES = 8
_MARK_BYTES = 4
"""What travels beside a sum of partial gradients: a number that says which they are."""
_FLOAT32_BITS = 32
Way = list[tuple[str, float, int]]
"""Operation, bytes and number of exchanges."""
Ways = tuple[Way, Way, Way]
"""In forward, in backward, and when forward is recomputed."""


@dataclass
class UnitPass:
    """One unit of its kind, one micro-batch, on one rank."""

    forward: Spent
    backward: Spent
    weight_share: float
    """What of `backward` computes gradients of weights; a pipeline may do it later."""
    recompute: Spent
    """Forward again, before backward."""
    exchanges: dict[Term, tuple[Spent, Spent]] = field(default_factory=dict)
    """What waits for other ranks, in forward and in backward (with what is recomputed)."""
    calls: list[CollectiveCalls] = field(default_factory=list)

    def exposed(self, *, backward: bool) -> float:
        """Return the seconds in which it waits for other ranks."""
        return sum(each[backward].seconds for each in self.exchanges.values())

    @property
    def forward_seconds(self) -> float:
        """Computing and waiting."""
        return self.forward.seconds + self.exposed(backward=False)

    @property
    def backward_seconds(self) -> float:
        """Computing and waiting, with what is recomputed."""
        return self.backward.seconds + self.recompute.seconds + self.exposed(backward=True)


def is_block(unit: ModelUnit, profile: ModelProfile) -> bool:
    """Return whether a unit is one of the repeated blocks; where the profile does not say, by its name."""
    if unit.is_block is not None:
        return unit.is_block
    return profile.blocks > 0 and (unit.count > 1 or unit.name.rpartition(".")[2].isdigit())


def is_recomputed(unit: ModelUnit, profile: ModelProfile, layout: RunLayout) -> bool:
    """Return whether the plan recomputes a unit."""
    recompute = layout.plan.recompute
    if isinstance(recompute, tuple):
        return any(fnmatchcase(unit.name, pattern) for pattern in recompute)
    return recompute == "blocks" and is_block(unit, profile)


def divides(unit: ModelUnit, layout: RunLayout) -> TensorFacts | None:
    """Return the recipe of a unit that tensor parallel divides; None: it is replicated."""
    ranks = layout.degrees.tensor
    if ranks == 1 or unit.tensor is None or unit.tensor.divides % ranks:
        return None
    return unit.tensor


def share_of(
    unit: ModelUnit, profile: ModelProfile, layout: RunLayout, *, divided: float, whole: float,
    gathered: float = 0.0,
) -> float:  # fmt: skip
    """Return what a rank has of `whole`, of which tensor parallel divides `divided`, and context all of it.

    `gathered`: what of the rest a rank has whole even if tokens are divided.
    """
    share = 1.0 / layout.degrees.context
    if divides(unit, layout) is None or not whole:
        return share
    alone = max(0.0, 1.0 - divided / whole)
    if layout.plan.sequence_parallel and is_block(unit, profile):
        alone = min(alone, gathered / whole)
    return share * (alone + (1.0 - alone) / layout.degrees.tensor)


def activation_share(unit: ModelUnit, profile: ModelProfile, layout: RunLayout) -> float:
    """Return what a rank has of what a unit keeps until backward; of one that is computed again, in that time.

    The second pass of a block keeps the tokens that were gathered for its layers by columns.
    """
    facts, whole = unit.tensor, unit.saved_bytes
    if facts is None:
        return share_of(unit, profile, layout, divided=0.0, whole=whole)
    gathered = facts.backward_sums * facts.sum_bytes if is_recomputed(unit, profile, layout) else 0.0
    return share_of(unit, profile, layout, divided=facts.saved_bytes, whole=whole, gathered=gathered)


def pass_of(unit: ModelUnit, profile: ModelProfile, layout: RunLayout, rates: Rates) -> UnitPass:
    """Return a pass of one unit."""
    forward, backward = _computing(unit, profile, layout, rates)
    again = is_recomputed(unit, profile, layout)
    made = UnitPass(forward, backward, _weight_share(unit), forward.times(1.0) if again else Spent())
    _add_tensor(made, unit, profile, layout, rates, again=again)
    _add_context(made, unit, layout, rates, again=again)
    _add_expert(made, unit, layout, rates, again=again)
    _add_waits(made, unit, layout, rates)
    return made


def _computing(unit: ModelUnit, profile: ModelProfile, layout: RunLayout, rates: Rates) -> tuple[Spent, Spent]:
    divided, samples = unit.tensor.flops if unit.tensor else 0.0, layout.samples
    flops_share = share_of(unit, profile, layout, divided=divided, whole=unit.forward_flops)
    more = _SHARD_STARTS if layout.plan.zero == MOST_ZERO and is_block(unit, profile) else (0, 0)
    times = unit.times
    if times is not None:
        passes = []
        for fixed, each, flops in (
            (times.forward_fixed_seconds, times.forward_sample_seconds, unit.forward_flops),
            (times.backward_fixed_seconds, times.backward_sample_seconds, unit.backward_flops),
        ):
            seconds = fixed + each * samples * flops_share
            if layout.plan.precision != "fp32":
                seconds *= _in_precision(unit, flops * samples * flops_share, layout, rates)
            spread = {"value": 0.0, "best": -times.spread, "worst": times.spread}[rates.case]
            passes.append(rates.measured(seconds * (1.0 + spread)))
            passes[-1].add(rates.launched(more[len(passes) - 1]))
        return passes[0], passes[1]
    moved = unit.moved_bytes * samples * activation_share(unit, profile, layout) * layout.width
    own = (sum(each.nbytes for each in unit.gradients) + unit.frozen_bytes) * layout.gradient_width
    own /= layout.degrees.tensor if divides(unit, layout) is not None else 1
    fused = unit.fused_flops, unit.fused_backward_flops
    if _in_slices(unit, layout, rates):
        fused = 0.0, 0.0
    products = unit.forward_flops - fused[0], unit.backward_flops - fused[1]
    wide = unit.uncast_flops / (products[0] or 1.0) if layout.casts else 0.0
    scale = samples * flops_share
    moved_bytes = (
        moved + (_CAST_MOVED if layout.casts else 1.0) * own,
        _BACKWARD_MOVED * moved + (2.0 + (_ACCUMULATED if layout.passes > 1 else 0.0)) * own,
    )
    forward, backward = (
        rates.unit_pass(
            PassWork(
                scale * products[way], moved_bytes[way], times * unit.operations + more[way],
                times * unit.products, scale * fused[way], wide,
            ),
            layout.plan.precision,
        )
        for way, times in enumerate((1, 2))
    )  # fmt: skip
    return forward, backward


def _in_slices(unit: ModelUnit, layout: RunLayout, rates: Rates) -> bool:
    """Return whether attention of a ring is matrix products of slices, as it is on accelerators."""
    facts = unit.attention
    if facts is None or layout.degrees.context == 1 or rates.cluster.on_cpus:
        return False
    if context_kind(facts, layout) == "heads":
        return False
    rates.assumed.add("attention of rings: what its scores move on accelerators is not in the prediction")
    return True


def _in_precision(unit: ModelUnit, flops: float, layout: RunLayout, rates: Rates) -> float:
    """Return by what times that were measured in fp32 change in the plan's precision: as the rates do."""
    size = flops / (unit.products or unit.operations or 1)
    if not flops or "fp32" not in rates.cluster.device.compute:
        return 1.0
    rates.assumed.add(
        f"units were measured in fp32: in {layout.plan.precision} they are scaled by the device's rates"
    )
    share = unit.uncast_flops / unit.forward_flops if layout.casts and unit.forward_flops else 0.0
    wide = rates.products(flops, "fp32", size).seconds
    return share + (1 - share) * rates.products(flops, layout.plan.precision, size).seconds / wide


def attention_flops(unit: ModelUnit) -> float:
    """Return what attention computes of one sample in forward beside its projections: 2 products."""
    facts = unit.attention
    if facts is None:
        return 0.0
    return unit.fused_flops or 2.0 * facts.sequence * query_bytes(facts) / 4


def query_bytes(facts: AttentionFacts) -> float:
    """Return the bytes of the queries of one sample, in fp32."""
    return facts.query_bytes or facts.key_value_bytes / 2


def _weight_share(unit: ModelUnit) -> float:
    """Return what of backward is for weights: as many products as forward has, but for those of attention."""
    if not unit.backward_flops:
        return 0.5
    return min(1.0, max(0.0, (unit.forward_flops - attention_flops(unit)) / unit.backward_flops))


# -- exchanges -------------------------------------------------------------------------------------


def _add_tensor(
    made: UnitPass, unit: ModelUnit, profile: ModelProfile, layout: RunLayout, rates: Rates, *, again: bool
) -> None:
    """Add sums of activations: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2."""
    facts, ranks = divides(unit, layout), layout.degrees.tensor
    if facts is None or not facts.forward_sums + facts.backward_sums:
        return
    whole = facts.sum_bytes * layout.samples / layout.degrees.context
    ends, begins = whole * layout.width, whole * layout.residual_width
    # What is recomputed ends where backward has what it needs: before the sum at the end of a block.
    repeated = max(0, facts.forward_sums - 1)
    ways: Ways
    if layout.plan.sequence_parallel and is_block(unit, profile):
        forward = [("all_gather", begins, facts.backward_sums), ("reduce_scatter", ends, facts.forward_sums)]
        backward = [("all_gather", ends, facts.forward_sums), ("reduce_scatter", begins, facts.backward_sums)]
        more = [("all_gather", begins, facts.backward_sums), ("reduce_scatter", ends, repeated)]
        if not again and "tensor" in divided_gradients(unit):  # for the gradients of weights
            backward.append(("all_gather", ends, facts.backward_sums))
        # Gradients of what is whole, and saw some of the tokens: norms, and biases that are added after a sum.
        # Those of one module are one sum.
        sums: dict[str, int] = {}
        for each, how in zip(unit.gradients, divided_gradients(unit), strict=True):
            if not how:
                module = each.name.rpartition(".")[0]
                sums[module] = sums.get(module, _MARK_BYTES) + each.nbytes
        backward += [("all_reduce", nbytes, 1) for nbytes in sums.values()]
        ways = forward, backward, more
    else:
        forward, more = [("all_reduce", ends, facts.forward_sums)], [("all_reduce", ends, repeated)]
        ways = forward, [("all_reduce", begins, facts.backward_sums)], more
    _exchange_both(made, "tensor", ways, ranks, layout=layout, rates=rates, again=again)


def edges_of_tokens(
    stage: Sequence[tuple[int, int]], profile: ModelProfile, layout: RunLayout, rates: Rates
) -> tuple[Spent, list[CollectiveCalls]]:
    """Return what gathers tokens behind each run of blocks, and gradients before it, with `sequence_parallel`."""
    spent, calls = Spent(), list[CollectiveCalls]()
    if not layout.plan.sequence_parallel or layout.degrees.tensor == 1:
        return spent, calls
    before = False
    for index, _ in stage:
        unit = profile.units[index]
        is_inside = is_block(unit, profile) and unit.tensor is not None and divides(unit, layout) is not None
        if is_inside and not before and unit.tensor is not None:
            nbytes = unit.tensor.sum_bytes * layout.samples / layout.degrees.context * layout.residual_width
            spent.add(rates.exchange("all_gather", layout.degrees.tensor, 1, nbytes), 2)
            calls.append(CollectiveCalls("all_gather", "tensor", layout.degrees.tensor, round(nbytes), 2))
        before = is_inside
    return spent, calls


def _add_context(made: UnitPass, unit: ModelUnit, layout: RunLayout, rates: Rates, *, again: bool) -> None:
    """Add what attention over divided sequences sends: see docs/fit/one-model.md."""
    facts, ranks = unit.attention, layout.degrees.context
    if facts is None or ranks == 1:
        return
    split = layout.degrees.tensor if divides(unit, layout) is not None else 1
    queries = query_bytes(facts) * layout.samples / (ranks * split)
    keys = facts.key_value_bytes * layout.samples / (ranks * split)
    if context_kind(facts, layout) == "heads":
        both = [("all_to_all", (queries + keys) * layout.width, 1), ("all_to_all", queries * layout.width, 1)]
        _exchange_both(made, "context", (both, both, both), ranks, layout=layout, rates=rates, again=again)
        return
    stride = layout.stride("context")
    hop = rates.exchange("send", ranks, stride, keys * layout.width)
    wide = rates.exchange("send", ranks, stride, keys)
    flops = attention_flops(unit) * layout.samples / (ranks * ranks * split)
    block = rates.products(flops, layout.plan.precision, flops / 2).seconds
    forward = hop.scaled_to(max(0.0, hop.seconds - block)).times(ranks - 1)
    back = Spent()
    back.add(hop)
    back.add(wide)
    backward = back.scaled_to(max(0.0, back.seconds - _BACKWARD_ATTENTION * block)).times(ranks - 1)
    if again:
        backward.add(forward)
    made.exchanges["context"] = forward, backward
    hops = (ranks - 1) * (3 if again else 2)
    made.calls += [
        CollectiveCalls("send", "context", ranks, round(keys * layout.width), hops),
        CollectiveCalls("send", "context", ranks, round(keys), ranks - 1),
    ]


def context_kind(facts: AttentionFacts, layout: RunLayout) -> str:
    """Return "heads" or "ring", as the product chooses for each call."""
    kind, ranks = layout.plan.context_kind, layout.degrees.context
    if kind != "auto":
        return kind
    split = layout.degrees.tensor
    heads = [facts.heads, facts.key_value_heads or facts.heads]
    return "heads" if all(each % (ranks * split) == 0 for each in heads) else "ring"


def _add_expert(made: UnitPass, unit: ModelUnit, layout: RunLayout, rates: Rates, *, again: bool) -> None:
    """Add the all-to-alls of tokens, two forward and two backward (docs/fit/one-model.md), for an even load."""
    facts, ranks = unit.expert, layout.degrees.expert
    if facts is None or ranks == 1:
        return
    tokens = facts.token_bytes * layout.samples / layout.degrees.context
    there, back = tokens * layout.residual_width, tokens * layout.width
    packed = CodecSpec.parse(layout.plan.expert_codec).packed_format
    if packed is not None:
        there, back = (min(each, tokens * packed.bits / _FLOAT32_BITS) for each in (there, back))
    both = [("all_to_all", there, 1), ("all_to_all", back, 1)]
    _exchange_both(made, "expert", (both, both, both), ranks, layout=layout, rates=rates, again=again)
    counts = _COUNT_BYTES * facts.experts * layout.sample_ranks
    small = rates.exchange("all_gather", layout.sample_ranks, layout.stride("expert"), counts)
    forward, backward = made.exchanges["expert"]
    forward.add(small)
    if again:
        backward.add(small)


def _add_waits(made: UnitPass, unit: ModelUnit, layout: RunLayout, rates: Rates) -> None:
    """Add to exchanges what their ranks wait for the slowest; see [Note: ranks that vary]."""
    if unit.times is None or not unit.times.jitter:
        return
    ranks = 1
    for degree, (forward, backward) in made.exchanges.items():
        before, ranks = ranks, ranks * getattr(layout.degrees, degree)
        more = wait_share(unit, ranks) - wait_share(unit, before)
        forward.add(rates.measured(more * made.forward.seconds))
        backward.add(rates.measured(more * (made.backward.seconds + made.recompute.seconds)))


def wait_share(unit: ModelUnit, ranks: int) -> float:
    """Return for what share of a pass over a unit the mean of `ranks` waits for the slowest of them."""
    return largest_normal(ranks) * unit.times.jitter if unit.times is not None and ranks > 1 else 0.0


def _exchange_both(
    made: UnitPass, degree: Term, ways: Ways, ranks: int, *, layout: RunLayout, rates: Rates, again: bool
) -> None:  # fmt: skip
    """Add what is exchanged in forward, and in backward; nothing hides it."""
    spent = Spent(), Spent()
    for i, way in enumerate(ways if again else ways[:2]):
        for operation, nbytes, count in way:
            spent[min(i, 1)].add(rates.exchange(operation, ranks, layout.stride(degree), nbytes), count)
            if count:
                made.calls.append(CollectiveCalls(operation, degree, ranks, round(nbytes), count))
    made.exchanges[degree] = spent
