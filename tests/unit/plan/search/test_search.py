"""The search against trying everything, on spaces small enough for that; and what it may propose at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.core.cluster import Cluster, CodecCost
from farandole.core.cluster_presets import preset_cluster
from farandole.core.vocabulary.codec_spec import NONE
from farandole.core.vocabulary.degrees import degrees_of
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.rules import check
from farandole.core.vocabulary.spec import Plan
from farandole.core.vocabulary.units import format_bytes
from farandole.plan.candidate import Candidate, Prediction
from farandole.plan.cost.predict import predict
from farandole.plan.profile import ModelProfile, write_profile
from farandole.plan.search.bounds import Bounds
from farandole.plan.search.decide import search
from farandole.plan.search.refine import refined
from farandole.plan.search.result import Goal, PredictedPlan, SearchRequest, parse_fixed
from farandole.plan.search.search import NEAR, Predictor, SearchQuestion, find, kinds_of, score
from farandole.plan.search.space import Space, settings_of

from .models import make_cluster, make_profile, predict_plainly

LIMIT = 16_000_000_000


def everything(question: SearchQuestion) -> Iterator[PredictedPlan]:
    """Yield every plan of a request that fits, with its prediction: no bound, no order, no budget."""
    profile, cluster, request, predicting, limit_bytes = question
    for _, layouts in Space(profile, request, cluster):
        for layout in layouts:
            for tuned in settings_of(layout, request, cluster):
                try:
                    candidate = layout.to_candidate(request.fixed, **tuned)
                    option = PredictedPlan(layout.family, candidate, predicting(profile, cluster, candidate))
                except PlanError:
                    continue
                if option.prediction.peak_bytes <= limit_bytes:
                    yield option


@pytest.mark.gate_cases("prime", "memory")
@pytest.mark.parametrize(
    ("goal", "limit_bytes", "changed"),
    [
        ("throughput", LIMIT, {}),
        ("throughput", 200_000_000, {}),
        ("memory", LIMIT, {}),
        ("cost", LIMIT, {}),
        ("time", LIMIT, {}),
        ("throughput", LIMIT, {"allow_lossy": True}),
        ("throughput", LIMIT, {"precisions": ("fp32", "bf16"), "fixed": {"tensor": 1}}),
        ("throughput", LIMIT, {"ranks": 3, "global_batch": 12}),
    ],
    ids=["throughput", "limit", "memory", "cost", "time", "lossy", "precision", "prime"],
)
def test_search_finds_what_trying_all_finds(goal: Goal, limit_bytes: int, changed: dict[str, Any]) -> None:
    """With enough effort nothing is missed, of any family: bounds and order only save work."""
    request = SearchRequest(**{"ranks": 4, "global_batch": 16, "goal": goal, "effort": 100_000, **changed})
    cluster = make_cluster(ranks=request.ranks, inside=min(2, request.ranks), codecs=True)
    question = SearchQuestion(make_profile(blocks=3), cluster, request, predict_plainly, limit_bytes)
    found = find(question)
    assert not found.left, f"{found.left} layouts were not looked at"
    best: dict[str, float] = {}
    for option in everything(question):
        value = score(option, goal)[0]
        best[option.family] = min(value, best.get(option.family, value))
    mine = {name: found.best(goal, name) for name in found.families}
    of_kinds = {name: score(option, goal)[0] for name, option in mine.items() if option is not None}
    for family, value in best.items():
        assert of_kinds[family] <= value * (1 + 1e-12), f"{family}: {of_kinds[family]}, trying all {value}"
    chosen = found.best(goal)
    assert chosen is not None, "nothing fits"
    most = min(best.values()) * (1 + (0.0 if goal == "memory" else NEAR))
    assert score(chosen, goal)[0] <= most * (1 + 1e-12), "the best plan was missed"
    near = [each for each in found.options if score(each, goal)[0] <= most]
    simplest = min((each.candidate.script_changes, len(kinds_of(each.candidate))) for each in near)
    assert (chosen.candidate.script_changes, len(kinds_of(chosen.candidate))) == simplest, f"{chosen}"


@pytest.mark.gate_cases("0.012-data")
@pytest.mark.parametrize(("gain", "chosen"), [(0.012, "data"), (0.04, "data x pipeline")])
def test_within_three_percent_the_fewest_kinds_of_parallelism_are_chosen(gain: float, chosen: str) -> None:
    """A gain inside of the error of predictions is no reason for a pipeline, and the answer says so."""

    def predicting(profile: ModelProfile, cluster: Cluster, candidate: Candidate) -> Prediction:
        seconds = {("data",): 1.0, ("pipeline", "data"): 1 - gain}.get(tuple(kinds_of(candidate)), 2.0)
        found = predict_plainly(profile, cluster, candidate)
        return replace(found, seconds=seconds, low_seconds=seconds, high_seconds=seconds)

    request = SearchRequest(4, 16, effort=100_000)
    answer = search(make_profile(), make_cluster(ranks=4), request, predicting)
    assert answer.best is not None
    assert answer.best.family == chosen
    other = next(each for each in answer.families if each.name in ("data", "data x pipeline") and each.reason)
    if chosen == "data":
        assert answer.families[1] == other, "the faster one comes first of those that were not chosen"
        said = "1.2% faster, and the script must be changed for it: within 3% that plan is chosen"
        assert other.reason.startswith(said), f"{other.reason}"
    least = search(make_profile(), make_cluster(ranks=4), replace(request, goal="memory"), predicting)
    assert least.best is not None
    assert least.best.prediction.peak_bytes == min(each.peak_bytes for each in least.points), "memory is exact"


@pytest.mark.full_cases("faster2-slower2-needs ZeRO-3, too")
@pytest.mark.parametrize(
    ("faster", "slower", "said"),
    [
        ((("pipeline", "data"), 0.98), (("data", "tensor", "ZeRO-3"), 1.0), "the script must be changed for it"),
        ((("pipeline", "context"), 0.98), (("pipeline", "data"), 1.0), "the script must be changed for it"),
        ((("data", "tensor", "ZeRO-3"), 0.98), (("data", "tensor"), 1.0), "needs ZeRO-3, too"),
    ],
)
def test_near_plans_change_little_in_the_script_and_have_few_kinds(
    faster: tuple[tuple[str, ...], float], slower: tuple[tuple[str, ...], float], said: str
) -> None:
    def predicting(profile: ModelProfile, cluster: Cluster, candidate: Candidate) -> Prediction:
        seconds = dict((faster, slower)).get(tuple(kinds_of(candidate)), 2.0)
        found = predict_plainly(profile, cluster, candidate)
        return replace(found, seconds=seconds, low_seconds=seconds, high_seconds=seconds)

    answer = search(make_profile(), make_cluster(ranks=4), SearchRequest(4, 16, effort=100_000), predicting)
    assert answer.best is not None
    assert tuple(kinds_of(answer.best.candidate)) == slower[0]
    assert said in answer.families[1].reason, answer.families[1]


@pytest.mark.full("further")
def test_what_no_pass_could_run_is_not_proposed() -> None:
    """A model that fails in another type, or where blocks run again."""
    plain = make_profile(blocks=3)
    profile = replace(plain, memory=replace(plain.memory, failed=(("bf16", "blocks"),)))

    def tried(**changed: Any) -> set[tuple[str, Any]]:
        request = SearchRequest(4, 16, effort=100_000, precisions=("fp32", "bf16"), **changed)
        found = find(SearchQuestion(profile, make_cluster(ranks=4), request, predict_plainly, LIMIT))
        return {(each.candidate.plan.precision, each.candidate.plan.recompute) for each in found.options}

    assert {("bf16", "none"), ("fp32", "blocks")} <= tried()
    assert ("bf16", "blocks") not in tried()
    assert tried(fixed={"recompute": "blocks"}) == {("fp32", "blocks")}
    option = next(
        each
        for each in find(SearchQuestion(profile, make_cluster(ranks=4), SearchRequest(4, 16, effort=100_000,
                         precisions=("bf16",)), predict_plainly, LIMIT)).options
        if each.candidate.plan.recompute == "none" and each.family == "data"
    )  # fmt: skip
    for known, names in ((plain, True), (profile, False)):
        more = refined(known, make_cluster(ranks=4), option, option.prediction.peak_bytes - 1, {})
        assert any(isinstance(each.plan.recompute, tuple) for each in more) == names, "no block by name either"
    with pytest.raises(PlanError, match=r"its pass fails in fp16, recompute = 'blocks'"):
        tried(fixed={"recompute": "blocks", "precision": "fp16"})


@pytest.mark.parametrize(("fixed", "least"), [({}, 60), ({"offload": "disk", "offload_directory": "states"}, 10)])
def test_floors_are_below_predictions(fixed: dict[str, Any], least: int) -> None:
    """No layout takes or holds less than its floor says, by the real cost model."""
    profile, cluster = make_profile(blocks=4), make_cluster(ranks=8, inside=4)
    request = SearchRequest(8, 32, precisions=("fp32", "bf16"), fixed=fixed)
    bounds = Bounds(profile, cluster, fixed)
    checked = 0
    for number, (base, layouts) in enumerate(Space(profile, request, cluster)):
        if number % 3 and not fixed:
            continue
        some = layouts[:: max(1, len(layouts) // 4)]
        for layout, floor in zip(some, bounds.of(base, some), strict=True):
            prediction = predict(profile, cluster, layout.to_candidate(fixed), interval=False)
            assert floor.seconds <= prediction.seconds * (1 + 1e-9), f"{layout}: {floor}, {prediction.seconds}"
            assert floor.nbytes <= prediction.peak_bytes, f"{layout}: {floor}, {prediction.peak_bytes}"
            checked += 1
    assert checked > least, f"only {checked} layouts"


@pytest.mark.gate_cases("cost model")
@pytest.mark.parametrize("predicting", [predict_plainly, predict], ids=["plain", "cost model"])
def test_every_proposed_plan_can_be_applied(predicting: Predictor) -> None:
    """Plans pass the product's own checks, need all ranks, and train on the batch that was asked for."""
    profile = make_profile(blocks=4, experts=4)
    request = SearchRequest(8, 64, allow_lossy=True, precisions=("fp32", "bf16", "fp16"), effort=400)
    cluster = make_cluster(ranks=8, inside=4, codecs=True)
    found = find(SearchQuestion(profile, cluster, request, predicting, LIMIT))
    assert len(found.options) > 100, f"{len(found.options)} plans"
    for option in found.options:
        candidate = option.candidate
        plan = Plan.from_mapping(candidate.plan.to_mapping(), where="a proposed plan")
        degrees = degrees_of(plan, candidate.ranks)
        check({**vars(plan), **degrees.above_one()})
        assert degrees.size == 8, f"{degrees}"
        assert candidate.global_batch == 64, f"{candidate}"
        parts = degrees.data * degrees.shard * degrees.expert * plan.accumulate * max(1, plan.micro_batches)
        assert 64 % parts == 0, f"{parts} parts of 64 samples: {candidate}"


def test_families_are_complete() -> None:
    """Every kind of plan is in the answer, with its best plan or the reason why it has none."""
    profile, cluster = make_profile(blocks=8, experts=8), make_cluster(ranks=8, inside=8)
    answer = search(profile, cluster, SearchRequest(8, 64), predict_plainly)
    names = {each.name for each in answer.families}
    single = {"data", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hybrid ZeRO-3", "tensor", "pipeline", "expert", "context"}
    assert single <= names, f"missing: {single - names}"
    assert answer.families[0].status == "chosen", f"{answer.families[0]}"
    assert [each.status for each in answer.families].count("chosen") == 1
    for each in answer.families[1:]:
        assert any(letter.isdigit() for letter in each.reason) or each.status == "impossible", f"{each}"
        assert each.reason, f"{each.name} has no reason"
    dense = search(make_profile(blocks=8), cluster, SearchRequest(8, 64), predict_plainly)
    expert = next(each for each in dense.families if each.name == "expert")
    assert expert.status == "impossible"
    assert expert.reason == "the model has no mixture of experts", f"{expert.reason}"


def test_schedules_are_all_looked_at() -> None:
    """Each schedule of the product is proposed somewhere."""
    request = SearchRequest(4, 32, fixed={"pipeline": 4}, effort=100_000)
    space = Space(make_profile(blocks=16), request, make_cluster())
    found = {(layout.schedule, layout.chunks) for _, layouts in space for layout in layouts}
    assert found == {("gpipe", 0), ("1f1b", 0), ("zb-h1", 0), ("zb-v", 0), ("interleaved", 2), ("interleaved", 4)}


def guessed(codecs: Mapping[str, CodecCost]) -> dict[str, CodecCost]:
    """Return codecs as a preset has them."""
    return {
        name: replace(cost, seconds_per_byte=replace(cost.seconds_per_byte, source="preset"))
        for name, cost in codecs.items()
    }


@pytest.mark.full("further")
def test_on_accelerators_nothing_is_proposed_that_takes_a_cpus_memory() -> None:
    """ZeRO-1 and 2, which `fd.distribute` refuses there, and codecs that were not measured, or with shards."""
    profile, request = make_profile(), SearchRequest(8, 64, allow_lossy=True, effort=3000)
    here = make_cluster(codecs=True)
    known = replace(here, fingerprint={"backend": "nccl"})
    there = replace(known, codecs=guessed(here.codecs))
    seen = []
    for cluster in (here, there, known):
        options = find(SearchQuestion(profile, cluster, request, predict_plainly, LIMIT)).options
        plans = [option.candidate.plan for option in options]
        seen.append(({plan.zero for plan in plans}, {plan.zero for plan in plans if plan.codec != NONE}))
    assert seen[0][0] >= {0, 1, 2, 3}
    assert seen == [(seen[0][0], {0, 1, 2, 3}), ({0, 3}, set()), ({0, 3}, {0})]
    fixed = SearchRequest(8, 64, fixed=parse_fixed(["codec=int8"]), effort=200)
    with pytest.raises(PlanError, match="how fast int8 is on an accelerator is not known"):
        find(SearchQuestion(profile, there, fixed, predict_plainly, LIMIT))
    options = find(SearchQuestion(profile, known, fixed, predict_plainly, LIMIT)).options
    assert {(option.candidate.plan.zero, option.candidate.plan.codec) for option in options} == {(0, "int8")}
    pattern = SearchRequest(8, 64, fixed={"codec_for": {"*": "int4"}}, effort=200)
    with pytest.raises(PlanError, match="how fast int4 is on an accelerator is not known from a measurement"):
        find(SearchQuestion(profile, known, pattern, predict_plainly, LIMIT))


def test_what_is_said_of_lossy_codecs() -> None:
    here = make_cluster(codecs=True)
    there = replace(here, fingerprint={"backend": "nccl"}, codecs=guessed(here.codecs))
    unknown = "lossy codecs were not considered (how fast they are here was not measured: farandole measure)"
    for cluster, allowed, said in (
        (here, False, "lossy codecs were not considered (--allow-lossy)"),
        (there, False, unknown), (there, True, unknown), (make_cluster(), True, unknown),
    ):  # fmt: skip
        request = SearchRequest(8, 64, allow_lossy=allowed, effort=50)
        answer = search(make_profile(), cluster, request, predict_plainly)
        assert [each for each in answer.warnings if "were not considered" in each] == [said]


def test_fixed_keys_hold() -> None:
    """What the user gives is in every plan; what nothing can have is said."""
    profile, cluster = make_profile(), make_cluster()
    fixed = parse_fixed(["tensor=2", "zero=1", "recompute=blocks", "bucket_bytes=2MiB", "clip_norm=1.0"])
    found = find(
        SearchQuestion(profile, cluster, SearchRequest(8, 64, fixed=fixed, effort=200), predict_plainly, LIMIT)
    )
    assert found.options, "nothing was found"
    for option in found.options:
        plan = option.candidate.plan
        assert (plan.tensor, plan.zero, plan.recompute, plan.clip_norm) == (2, 1, "blocks", 1.0), f"{plan}"
        assert plan.bucket_bytes == 2**21, f"{plan.bucket_bytes}"


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        (["tensor=3"], "do not divide the ranks"),
        (["expert=2"], "the model has no mixture of experts"),
        (["tensor=8", "context=1", "data=2"], "do not divide the ranks"),
        (["accumulate=7"], "samples of a rank do not divide into 7 passes"),
        (["zero=3", "route=flat"], 'route = "flat" with zero = 3'),
        (["pipeline=8", "precision=fp16"], 'precision = "fp16" with pipeline = 8'),
    ],
)
def test_impossible_requests_say_why(fixed: list[str], said: str) -> None:
    """Fixed values that no plan can have are an error with the reason."""
    request = SearchRequest(8, 64, fixed=parse_fixed(fixed))
    with pytest.raises(PlanError, match="no plan for 8 ranks with") as raised:
        find(SearchQuestion(make_profile(), make_cluster(), request, predict_plainly, LIMIT))
    assert said in str(raised.value), f"{raised.value}"


@pytest.mark.parametrize(
    ("fixed", "has_dropout", "said"),
    [
        (["context=16"], True, "attention has dropout, and 8 heads of a rank in a ring of 16 have none"),
        (["context=4", "tensor=4"], True, "attention has dropout, and 2 heads of a rank in a ring of 4 have none"),
        (["context=2", "context_kind=ring"], True, "attention has dropout, and 8 heads of a rank in a ring of 2"),
        (["context=16", "context_kind=heads"], False, '"heads" does not divide 8 heads of a rank by 16'),
        (["context=16"], False, ""),
        (["context=8"], True, ""),
    ],
)  # fmt: skip
def test_what_attention_refuses_is_not_proposed(fixed: list[str], has_dropout: bool, said: str) -> None:
    """The ring form of context parallel has no dropout, and the form by heads needs heads that divide."""
    plain = make_profile()
    units = [
        replace(each, attention=each.attention and replace(each.attention, has_dropout=has_dropout))
        for each in plain.units
    ]
    request = SearchRequest(16, 64, fixed=parse_fixed(fixed))
    question = SearchQuestion(replace(plain, units=tuple(units)), make_cluster(ranks=16, inside=16), request,
                              predict_plainly, LIMIT)  # fmt: skip
    if not said:
        assert find(question).options, "it can be proposed"
        return
    with pytest.raises(PlanError, match="no plan for 16 ranks with") as raised:
        find(question)
    assert said in str(raised.value), f"{raised.value}"


def test_a_precision_twice_is_one() -> None:
    def predicted(*precisions: str) -> int:
        request = SearchRequest(2, 8, precisions=precisions, effort=30)
        return find(SearchQuestion(make_profile(), make_cluster(), request, predict_plainly, LIMIT)).layouts

    assert predicted("fp32", "fp32") == predicted("fp32")


def test_what_an_accelerator_cannot_have_is_the_reason_alone() -> None:
    question = SearchQuestion(
        replace(make_profile(), device="cuda"), preset_cluster("dgx-h100", 8),
        SearchRequest(8, 64, fixed={"zero": 1}), predict_plainly, LIMIT,
    )  # fmt: skip
    with pytest.raises(PlanError) as raised:
        find(question)
    assert "zero = 1: ZeRO-1 takes tensors in the memory of a CPU; fix fewer keys" in str(raised.value)


def test_prime_ranks_and_batches_that_do_not_divide() -> None:
    """Seven ranks are a pipeline of seven; where nothing divides, the nearest batch is named."""
    profile, cluster = make_profile(), make_cluster(ranks=7, inside=7)
    answer = search(profile, cluster, SearchRequest(7, 64), predict_plainly)
    assert answer.best is not None
    assert answer.best.family == "pipeline", f"{answer.best.family}"
    reasons = {each.name: each.reason for each in answer.families}
    assert reasons["data"] == "a global batch of 64 samples does not divide over 7 ranks", f"{reasons['data']}"
    uncut = replace(profile, can_be_cut="it decides by values")
    with pytest.raises(PlanError, match="a global batch of 63 would divide"):
        search(uncut, cluster, SearchRequest(7, 64), predict_plainly)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tensor", "expected key=value"),
        ("tensr=2", "did you mean 'tensor'"),
        ("version=1", "a plan has no key 'version'"),
        ("tensor=two", "expected a whole number"),
        ("tensor=0", "expected at least 1"),
        ("precision=fp64", "expected one of"),
    ],
)
def test_bad_fixed_keys(line: str, said: str) -> None:
    """Each has an error of its own."""
    with pytest.raises(PlanError) as raised:
        parse_fixed([line])
    assert said in str(raised.value), f"{raised.value}"


def test_shared_weights_keep_zero_out_of_pipelines() -> None:
    """A pipeline whose stages may share a weight shards nothing, as the product would refuse it."""
    tied = replace(make_profile(), tied=("embedding.weight = head.weight",))
    request = SearchRequest(4, 16, effort=200)
    found = find(SearchQuestion(tied, make_cluster(ranks=4, inside=4), request, predict_plainly, LIMIT))
    pipelines = [each.candidate.plan for each in found.options if each.candidate.plan.pipeline != 1]
    assert pipelines, "no pipeline was proposed"
    assert all(plan.zero == 0 for plan in pipelines), f"{[plan.zero for plan in pipelines]}"


def test_bad_requests() -> None:
    """Numbers that cannot be, and an unknown goal."""
    for changed, said in (
        ({"goal": "speed"}, "--goal speed"), ({"ranks": 0}, "ranks = 0"), ({"effort": 0}, "effort"),
        ({"global_batch": 0}, "global batch = 0"),
        ({"global_batch": 10**12}, "125000000000 samples of a step for each of 8 ranks, expected at most 1048576"),
        ({"memory_bytes": 8}, "memory = 8 bytes of a rank, expected at least 1048576; give it with its unit"),
        ({"precisions": ("fp8",)}, "--precision fp8"),
    ):  # fmt: skip
        with pytest.raises(PlanError) as raised:
            SearchRequest(**{"ranks": 8, "global_batch": 8, **changed})  # type: ignore[arg-type]
        assert said in str(raised.value), f"{raised.value}"
    with pytest.raises(PlanError, match="fixed to 2 too"):
        parse_fixed(["tensor=2", "tensor=4"])


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    """The least memory of all plans, what is too much, and what would make it fit."""
    profile, cluster = make_profile(), make_cluster(memory=3e7)
    answer = search(profile, cluster, SearchRequest(8, 64), predict_plainly)
    assert answer.best is None
    first, *ways = answer.advice
    least = min(each.option.prediction.peak_bytes for each in answer.families if each.option)
    assert first.startswith(f"does not fit: the least is {format_bytes(least)} on a rank"), f"{first}"
    assert f"{format_bytes(least - 30_000_000)} more than 30 MB" in first, f"{first}"
    assert least < 62e6, "a search that only goes by time finds 88 MB"
    assert any(way.startswith("it would fit on ") and "ranks" in way for way in ways), f"{ways}"
    assert all(each.status in ("does not fit", "impossible") for each in answer.families)
    with pytest.raises(PlanError, match="does not fit"):
        _ = answer.plan


def test_recomputation_is_as_little_as_fits() -> None:
    """Between no recomputation, which is too large, and of all blocks: as many blocks as memory asks for."""
    profile, cluster = make_profile(blocks=16), make_cluster(ranks=4, inside=4)
    fixed = {"data": 4, "zero": 0, "accumulate": 1}
    free = _best(profile, cluster, fixed, LIMIT)
    needed = free.prediction.peak_bytes
    tight = _best(profile, cluster, fixed, round(0.9 * needed))
    all_of = _best(profile, cluster, {**fixed, "recompute": "blocks"}, LIMIT)
    recompute = tight.candidate.plan.recompute
    assert isinstance(recompute, tuple), f"{recompute}"
    assert 0 < len(recompute) < 16, f"{len(recompute)} of 16 blocks"
    assert tight.prediction.peak_bytes <= 0.9 * needed
    assert free.prediction.seconds < tight.prediction.seconds < all_of.prediction.seconds


def _best(profile: ModelProfile, cluster: Cluster, fixed: dict[str, Any], limit_bytes: int) -> PredictedPlan:
    found = find(SearchQuestion(profile, cluster, SearchRequest(4, 64, fixed=fixed), predict, limit_bytes))
    best = found.best("throughput")
    assert best is not None, "nothing fits"
    return best


@pytest.mark.full("slow")
def test_4096_ranks_are_searched_in_ten_seconds_and_a_gigabyte(tmp_path: Path) -> None:
    """In a process of its own, without torch. The time of its processor counts, not that of others."""
    write_profile(make_profile(blocks=80, width=8192), tmp_path / "model.json")
    script = """
import sys, time
from farandole.core.cluster_presets import preset_cluster
from farandole.plan.profile import read_profile
from farandole.plan.search.decide import search
from farandole.plan.search.result import SearchRequest
begin = time.process_time()
request = SearchRequest(4096, 8192, precisions=("fp32", "bf16"))
answer = search(read_profile(sys.argv[1]), preset_cluster("dgx-h100", 4096), request)
spent = time.process_time() - begin
assert "torch" not in sys.modules
assert answer.best is not None
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(spent, int(peak) / 2**20)
"""
    words = [sys.executable, "-c", script, str(tmp_path / "model.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, done.stderr
    seconds, gibibytes = map(float, done.stdout.split())
    assert seconds <= 10, f"{seconds:.1f} s of a processor"
    assert gibibytes <= 1, f"{gibibytes:.2f} GiB"
