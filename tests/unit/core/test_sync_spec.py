"""The plan's `sync`: what it says, what is refused, and at which steps parts of a model are sent."""

from __future__ import annotations

import pytest

from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.core.vocabulary.sync_spec import SyncSpec
from farandole.plan.candidate import Candidate
from farandole.plan.cost.predict import predict
from farandole.plan.search.result import SearchRequest
from tests.unit.plan.cost.cases import cluster_of, transformer


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("every_step:H=2", "no options"),
        ("auto:H=2", "no options"),
        ("auto", 'set codec = "auto" and lossy = true'),
        ("locl", "did you mean 'local'"),
        ("local:H=0", "a number of steps from 1"),
        ("local:H=-3", "a number of steps from 1"),
        ("local:H=2.5", "a number of steps from 1"),
        ("local:30", "expected key=value"),
        ("local:h=3", "no option 'h'; known: H, first"),
        ("local:H=3,H=4", "given twice"),
        ("diloco:momentum=1", "below 1"),
        ("diloco:momentum=nan", "below 1"),
        ("diloco:outer_lr=0", "above 0"),
        ("diloco:outer_lr=inf", "above 0"),
        ("diloco:nesterov=maybe", "true or false"),
        ("post_local:first=-1", "from 0"),
        ("streaming:H=32", "no multiple of fragments = 5"),
        ("local:H=4,overlap=4", "overlap below 4"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(sync=text)
    assert said in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"zero": 1},
        {"zero": 3},
        {"pipeline": 2},
        {"tensor": 2},
        {"expert": 2},
        {"context": 2},
        {"sync_batch_norm": True},
        {"precision": "fp16"},
        {"precision": "bf16", "bf16_parameters": True},
        {"balance": "2,1"},
        {"train_schedule": {"0": "*"}},
        {"offload": "disk"},
        {"codec_for": {"*": "int8"}},
        {"route": "hierarchical"},
        {"codec": "auto"},
    ],
    ids=lambda keys: next(iter(reversed(keys))),
)
def test_what_does_not_go_with_it_is_refused_with_the_reason(keys: dict[str, object]) -> None:
    name = list(keys)[-1]
    with pytest.raises(PlanError, match=f"sync.*{name}|{name}.*sync"):
        Plan(sync="local:H=4", **keys)  # type: ignore[arg-type]
    Plan(**keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "fragments"), [(30, 1), (30, 5), (6, 3), (4, 4), (1, 1)])
def test_each_part_is_sent_once_in_h_steps_and_apart(steps: int, fragments: int) -> None:
    spec = SyncSpec.parse(f"local:H={steps},fragments={fragments}")
    sent = {step: spec.sends(step) for step in range(1, 4 * steps + 1)}
    for part in range(fragments):
        at = [step for step, parts in sent.items() if part in parts]
        assert at == [(part + 1) * steps // fragments + steps * k for k in range(4)]
    assert max(len(parts) for parts in sent.values()) == 1


def test_the_planner_neither_compares_nor_predicts_it() -> None:
    with pytest.raises(PlanError, match="sync=diloco changes what is trained"):
        SearchRequest(4, 64, fixed={"sync": "diloco"})
    profile, cluster = transformer(layers=2, hidden=64, sequence=32, heads=4), cluster_of(2, 2)
    with pytest.raises(PlanError, match=r'sync = "diloco": .* is not predicted yet'):
        predict(profile, cluster, Candidate(Plan(sync="diloco"), 4, 64))


def test_presets_are_what_the_papers_have() -> None:
    diloco, streaming, later = (SyncSpec.parse(each) for each in ("diloco", "streaming", "post_local"))
    assert (diloco.outer_lr, diloco.momentum, diloco.nesterov, diloco.fragments) == (0.7, 0.9, True, 1)
    assert streaming.codec("none") == "int4"
    assert streaming.codec("int8") == "int8"
    assert streaming.fragments > 1 < streaming.overlap
    assert later.is_plain_mean
    assert later.first > 0
    assert diloco.codec("none") == "none"


def test_servers() -> None:
    spec = SyncSpec.parse("server:staleness=3,servers=2,snapshot_seconds=5")
    assert (spec.is_server, spec.staleness, spec.servers, spec.snapshot_seconds) == (True, 3, 2, 5.0)
    assert SyncSpec.parse("server").staleness == 0
    assert SyncSpec.parse("async").staleness is None
    assert SyncSpec.parse("server:servers=1,staleness=0").to_text() == "server:servers=1"
    assert not spec.exchanges_gradients
    assert Plan(sync="async").sync == "async"


@pytest.mark.parametrize(
    ("sync", "match"),
    [
        ("server:staleness=-1", "staleness = -1, expected a number of steps from 0"),
        ("server:staleness=many", "staleness = 'many', expected a number of steps from 0"),
        ("server:servers=0", "servers = 0, expected a number of servers from 1, at most one a rank"),
        ("server:snapshot_seconds=inf", "snapshot_seconds = inf, expected a number of seconds from 0"),
        ("server:H=3", "server has no H; it has staleness, servers, snapshot_seconds"),
        ("local:staleness=3", "local has no staleness; it has H, outer_lr"),
        ("async:staleness=3", "async has no bound; write server:staleness=3"),
        ("asink", "unknown 'asink'"),
    ],
)
def test_bad_servers_are_refused_with_what_was_expected(sync: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        SyncSpec.parse(sync)


@pytest.mark.parametrize(
    "keys",
    [{"codec": "int8"}, {"codec": "auto", "lossy": True}, {"clip_norm": 1.0}, {"nonfinite": "skip"}, {"zero": 1},
     {"precision": "fp16"}, {"route": "hierarchical"}, {"balance": "speed"}],
)  # fmt: skip
def test_what_does_not_go_with_servers_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="sync"):
        Plan(sync="server", **keys)  # type: ignore[arg-type]
