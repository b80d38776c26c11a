"""What codecs keep is saved and loaded: the same ranks go on bit for bit, others conserve the mean."""

from __future__ import annotations

import copy
import io
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import farandole as fd
from farandole.comm.codecs.codec import leaves
from farandole.comm.codecs.saved_state import merge
from farandole.comm.messages import GroupRank, Message, Rounds
from farandole.core.vocabulary.errors import ConfigError
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, data
from tests.ranks.test_coded_engine import CODECS, coded_buckets, segments_of, step, the_reducer

WIDTH = 127
MATRICES = ["0.weight", "2.weight"]
HERE = "tests.ranks.test_exchange_state"
Job = tuple[nn.Sequential, torch.optim.Optimizer]


def odd(seed: int) -> nn.Sequential:
    """Return a model whose matrices end inside of a cache line, and are together large enough to be sampled."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 129), nn.Tanh(), nn.Linear(129, 67), nn.Tanh(), nn.Linear(67, 3))


def begin(plan: fd.Plan, seed: int = 1) -> Job:
    model = odd(seed)
    return fd.distribute(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.5), plan)


def train(job: Job, seeds: range) -> None:
    for seed in seeds:
        step(*job, *data(12, seed, WIDTH))


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved(job: Job) -> dict[str, Any]:
    model, optimizer = job
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "codecs": fd.exchange_state(model)}
    loaded: dict[str, Any] = through_a_file(parts)
    return loaded


def load(job: Job, state: dict[str, Any]) -> None:
    model, optimizer = job
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it would keep these very tensors
    fd.load_exchange_state(model, state["codecs"])


def assert_equal(mine: nn.Module, other: nn.Module) -> None:
    for name, value in mine.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def assert_continues(plan: fd.Plan, *, steps_before_loading: int = 0) -> None:
    """Six steps are three, a file, a fresh model and three more."""
    job = begin(plan)
    train(job, range(3))
    state = saved(job)
    train(job, range(3, 6))
    again = begin(plan, seed=2)
    train(again, range(10, 10 + steps_before_loading))
    load(again, state)
    train(again, range(3, 6))
    assert_equal(again[0], job[0])
    assert_same_bits(again[0])
    without = begin(plan, seed=2)
    load(without, {**state, "codecs": {}})
    train(without, range(3, 6))
    assert not torch.equal(without[0].get_parameter("0.weight"), job[0].get_parameter("0.weight")), (
        "the state matters"
    )


def on_two_hosts() -> None:
    """Make two hosts of two out of four ranks; before `fd.init`."""
    rank = int(os.environ["FARANDOLE_RANK"])
    place = {"NODE_RANK": rank // 2, "NODE_COUNT": 2, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}
    os.environ.update({f"FARANDOLE_{name}": str(value) for name, value in place.items()})


# -- codecs of a person's own ----------------------------------------------------------------------


class Mood(NamedTuple):
    level: float
    steps: int
    times: torch.Tensor


class Moody:
    """Its numbers differ from segment to segment and from rank to rank; it keeps a tensor of whole numbers."""

    def init(self, grad: torch.Tensor, group: GroupRank) -> Mood:
        return Mood(0.0, 0, torch.zeros(grad.shape, dtype=torch.int64))

    def encode(self, grad: torch.Tensor, state: Mood, group: GroupRank) -> Rounds:
        level = np.float64(0.5) * state.level + float(grad.abs().mean())
        sent = torch.where(grad.abs() > level / (1 + state.times), grad, torch.zeros_like(grad))
        total = yield Message(sent.clone(), "all_reduce")
        return total / group.size, sent, Mood(level, state.steps + 1, state.times + (sent != 0))


class Histogram(NamedTuple):
    histogram: torch.Tensor


class Careless:
    """It keeps what cannot be cut into parameters."""

    def init(self, grad: torch.Tensor, group: GroupRank) -> Histogram:
        return Histogram(torch.zeros(7))

    def encode(self, grad: torch.Tensor, state: Histogram, group: GroupRank) -> Rounds:
        total = yield Message(grad.clone(), "all_reduce")
        return total / group.size, grad, state


moody, careless = Moody(), Careless()


# -- the same ranks --------------------------------------------------------------------------------

ALL = [*CODECS, "topk:0.05,warmup_steps=8", f"{HERE}.moody"]


@pytest.mark.gate_cases("bf16-None")
@pytest.mark.parametrize("segment", [None, 1024])
@pytest.mark.parametrize("codec", ALL)
@ranks(2)
def test_a_run_goes_on_bit_for_bit(codec: str, segment: int | None) -> None:
    fd.init()
    with ExitStack() as stack:
        if segment is not None:
            stack.enter_context(segments_of(segment))
        assert_continues(fd.Plan(codec=codec))


@pytest.mark.full("further")
@pytest.mark.parametrize("codec", ["int4:rounding=stochastic", "topk:0.05,momentum=0.5", "powersgd:4"])
@ranks(2)
def test_loading_after_the_first_backward(codec: str) -> None:
    fd.init()
    assert_continues(fd.Plan(codec=codec), steps_before_loading=2)


@pytest.mark.full("further")
@pytest.mark.parametrize("codec", ["sign", "int4:rounding=stochastic", "topk:0.05,momentum=0.5", "powersgd:4"])
@ranks(4)
def test_two_hosts_go_on_bit_for_bit(codec: str) -> None:
    on_two_hosts()
    fd.init()
    plan = fd.Plan(codec=codec, route="hierarchical")
    assert_continues(plan)
    with segments_of(1024):
        assert_continues(plan, steps_before_loading=1)


@pytest.mark.full("further")
@ranks(2)
def test_each_parameter_by_its_own_codec_and_bucket() -> None:
    fd.init()
    plan = fd.Plan(codec="int4", codec_for={"2.weight": "powersgd:2"}, first_bucket_bytes=1024)
    assert_continues(plan)


@pytest.mark.full("further")
@ranks(2)
def test_buckets_may_change_where_every_rank_carries_all() -> None:
    fd.init()
    job = begin(fd.Plan(codec="topk:0.05,momentum=0.5"))
    train(job, range(3))
    state = saved(job)
    again = begin(fd.Plan(codec="topk:0.05,momentum=0.5", bucket_bytes=1024, first_bucket_bytes=1024))
    train(again, range(1))
    load(again, state)
    for name, entry in fd.exchange_state(again[0])["parameters"].items():
        for key in ("residual", "velocity"):
            assert torch.equal(entry["elements"][key], state["codecs"]["parameters"][name]["elements"][key])


@ranks(2)
def test_another_codec_takes_what_is_left_to_send() -> None:
    fd.init()
    job = begin(fd.Plan(codec="topk:0.05,momentum=0.5"))
    train(job, range(3))
    state = saved(job)
    again = begin(fd.Plan(codec="int8:rounding=stochastic"))
    train(again, range(1))
    load(again, state)
    for name, bucket in coded_buckets(again[0]).items():
        assert sorted(leaves(bucket.coded.states.current[0])) == ["draws", "residual", "seed"]
        mine = bucket.coded.unsent()[bucket.members.index(0 if name == "0.weight" else 2)]
        assert torch.equal(mine, state["codecs"]["parameters"][name]["elements"]["residual"])
    train(again, range(1))


# -- when there is little or nothing ---------------------------------------------------------------


@pytest.mark.gate_cases("int8")
@pytest.mark.parametrize("codec", ["int8", "powersgd:4"])
@ranks(2)
def test_what_is_saved_is_the_same_where_torch_has_moved_the_gradients(codec: str) -> None:
    fd.init()
    model, optimizer = begin(fd.Plan(codec=codec, route="flat"))
    train((model, optimizer), range(2))
    before = fd.exchange_state(model)["parameters"]
    model.double()
    model.float()
    for name, entry in fd.exchange_state(model)["parameters"].items():
        assert entry["place"] == before[name]["place"], name
        for key, tensor in entry["elements"].items():
            assert torch.equal(tensor, before[name]["elements"][key]), f"{key} of {name}"


@ranks(2)
def test_nothing_to_save() -> None:
    fd.init()
    job = begin(fd.Plan())
    train(job, range(1))
    assert fd.exchange_state(job[0]) == {}
    fd.load_exchange_state(job[0], {})
    early, _ = begin(fd.Plan(codec="int8"))
    assert fd.exchange_state(early) == {}, "before the first backward"
    with pytest.raises(ConfigError, match="this Sequential is not distributed"):
        fd.exchange_state(odd(1))


@ranks(1)
def test_alone() -> None:
    fd.init()
    job = begin(fd.Plan(codec="int8"))
    train(job, range(1))
    assert fd.exchange_state(job[0]) == {}
    fd.load_exchange_state(job[0], [{}, {}])
    entry = {"codec": "int8", "scale": 1, "place": [], "padding": {}, "numbers": [], "others": {}}
    entry["elements"] = {"residual": torch.zeros(129, WIDTH)}
    state = {"version": 1, "rank": 0, "size": 1, "parameters": {"0.weight": entry}}
    with pytest.warns(RuntimeWarning, match="a world of one rank exchanges nothing"):
        fd.load_exchange_state(job[0], state)


@pytest.mark.full("further")
@ranks(2)
def test_what_waits_for_its_bucket_is_saved_too() -> None:
    fd.init()
    job = begin(fd.Plan(codec="sign"))
    train(job, range(2))
    state = saved(job)["codecs"]
    again, optimizer = begin(fd.Plan(codec="sign"))
    fd.load_exchange_state(again, state)
    again[2].weight.requires_grad_(False)
    kept = through_a_file(fd.exchange_state(again))
    assert sorted(kept["parameters"]) == MATRICES
    train((again, optimizer), range(2))
    later = fd.exchange_state(again)["parameters"]
    old = state["parameters"]
    assert torch.equal(later["2.weight"]["elements"]["residual"], old["2.weight"]["elements"]["residual"])
    assert not torch.equal(later["0.weight"]["elements"]["residual"], old["0.weight"]["elements"]["residual"])
    again[2].weight.requires_grad_(True)
    train((again, optimizer), range(2, 3))
    assert sorted(coded_buckets(again)) == MATRICES
    later = fd.exchange_state(again)["parameters"]
    assert not torch.equal(later["2.weight"]["elements"]["residual"], old["2.weight"]["elements"]["residual"])


# -- other ranks -----------------------------------------------------------------------------------


def mean_left(model: nn.Module, key: str) -> dict[str, torch.Tensor]:
    """Return what the mean over all ranks still misses, read from the buckets: the mean over each circle."""
    found = {}
    names = [name for name, _ in model.named_parameters()]
    for bucket in {id(bucket): bucket for bucket in coded_buckets(model).values()}.values():
        if bucket.spec.is_exact:
            continue
        total = torch.zeros(bucket.gradients.flat.numel(), dtype=torch.float64)
        for k, unit in enumerate(bucket.coded.by_unit(total)):
            unit.copy_(torch.as_tensor(leaves(bucket.coded.states.current[k])[key]))
        dist.all_reduce(total)
        total /= len(bucket.coded.group.ranks)
        for index, part in zip(bucket.members, bucket.coded.by_part(total), strict=True):
            found[names[index]] = part.clone()
    return found


def keys_of(codec: str) -> list[str]:
    return ["residual", "velocity"] if "momentum" in codec else ["residual"]


def plan_of(codec: str, route: str, **more: Any) -> fd.Plan:
    return fd.Plan(**{"codec": codec, "route": route, **more})


def first_job(directory: str, codec: str, route: str) -> None:
    if route == "hierarchical":
        on_two_hosts()
    world = fd.init()
    job = begin(plan_of(codec, route))
    train(job, range(3))
    torch.save(saved(job), Path(directory) / f"{world.rank}.pt")
    left = {key: mean_left(job[0], key) for key in keys_of(codec)}
    if world.rank == 0:
        torch.save(left, Path(directory) / "left.pt")


def next_job(directory: str, codec: str, route: str, old_ranks: int) -> None:
    if route == "hierarchical":
        on_two_hosts()
    fd.init()
    files = [torch.load(Path(directory) / f"{rank}.pt", weights_only=True) for rank in range(old_ranks)]
    state = {**files[0], "codecs": [file["codecs"] for file in files]}
    with segments_of(4096):
        plan = plan_of(codec, route, bucket_bytes=40000, first_bucket_bytes=1024)
        late, early = begin(plan, seed=2), begin(plan, seed=3)
        train(late, range(2))
        load(late, state)
        assert_left(late[0], torch.load(Path(directory) / "left.pt", weights_only=True))
        load(early, state)
        assert_kept(fd.exchange_state(early[0]), files[0]["codecs"])
        for job in (late, early):
            train(job, range(3, 5))
        assert_equal(early[0], late[0])
        assert_same_bits(early[0])
        load(late, {**saved(late), "codecs": fd.exchange_state(late[0])})  # and from here on as any other


def assert_left(model: nn.Module, left: dict[str, dict[str, torch.Tensor]]) -> None:
    assert {bucket.coded.local_size for bucket in coded_buckets(model).values()} <= {1, 2}
    for key, expected in left.items():
        found = mean_left(model, key)
        assert sorted(found) == sorted(expected) == MATRICES
        for name, value in found.items():
            assert float(expected[name].abs().max()) > 0
            torch.testing.assert_close(value, expected[name], rtol=3e-7, atol=1e-12, msg=f"{key} of {name}")


def assert_kept(merged: dict[str, Any], first: dict[str, Any]) -> None:
    for name, entry in merged["parameters"].items():
        old = first["parameters"][name]
        assert all(torch.equal(tensor, old["others"][key]) for key, tensor in entry["others"].items())
        assert sorted(entry["others"]) == sorted(old["others"])
        numbers = old["numbers"][0] if old["numbers"] else entry["numbers"][0]
        kept = {key: value for key, value in numbers.items() if key not in ("seed", "level")}
        assert [{key: numbers[key] for key in kept} for numbers in entry["numbers"]] == [kept]


RESIZED = [
    "int4:rounding=stochastic", "sign", "topk:0.05,momentum=0.5", "randomk:0.2", "powersgd:4", f"{HERE}.moody",
]  # fmt: skip


@pytest.mark.full("further")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("codec", RESIZED)
def test_other_ranks_conserve_the_mean(tmp_path: Path, codec: str, before: int, after: int) -> None:
    plan = {"directory": str(tmp_path), "codec": codec, "route": "flat"}
    ranks(before)(first_job)(**plan)
    ranks(after)(next_job)(**plan, old_ranks=before)


@pytest.mark.full("further")
@pytest.mark.parametrize("routes", [("hierarchical", "flat"), ("flat", "hierarchical"), ("hierarchical",) * 2])
@pytest.mark.parametrize("codec", ["int4:rounding=stochastic", "topk:0.05,momentum=0.5", "powersgd:4"])
def test_another_route_conserves_the_mean(tmp_path: Path, codec: str, routes: tuple[str, str]) -> None:
    sizes = [4 if route == "hierarchical" else 3 for route in routes]
    plan = {"directory": str(tmp_path), "codec": codec}
    ranks(sizes[0])(first_job)(**plan, route=routes[0])
    ranks(sizes[1])(next_job)(**plan, route=routes[1], old_ranks=sizes[0])


@pytest.mark.full("further")
@ranks(3)
def test_ranks_draw_their_own_random_numbers_after_a_merge() -> None:
    world = fd.init()
    job = begin(fd.Plan(codec="int8:rounding=stochastic"))
    train(job, range(1))
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, fd.exchange_state(job[0]))
    fd.load_exchange_state(job[0], everyone)
    states = coded_buckets(job[0])["0.weight"].coded.states
    draws = states.current[0].codec.draws
    assert draws > 0
    assert states.current[0].codec.seed == world.rank + 1
    train(job, range(1))
    assert states.current[0].codec.draws == 2 * draws


def test_a_merge_multiplies_by_the_scale() -> None:
    def entry(scale: int, *residual: float) -> dict[str, Any]:
        elements = {"residual": torch.tensor(residual)}
        return {"codec": "int8", "scale": scale, "place": [], "elements": elements, "numbers": [], "others": {}}

    # Two hosts of two ranks, a slice of one element each: host means miss 3 and 5, then 1 and -1.
    hosts = [entry(2, 3.0, 0.0), entry(2, 0.0, 1.0), entry(2, 5.0, 0.0), entry(2, 0.0, -1.0)]
    assert merge(hosts)["elements"]["residual"].tolist() == [4.0, 0.0]
    assert merge([entry(1, 1.0), entry(1, 2.0)])["elements"]["residual"].tolist() == [1.5]


# -- what does not fit -----------------------------------------------------------------------------


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    parameters = {name.replace("2.", "9."): entry for name, entry in state["parameters"].items()}
    return {**state, "parameters": parameters}


def reshaped(state: dict[str, Any]) -> dict[str, Any]:
    entry = state["parameters"]["0.weight"]
    entry = {**entry, "elements": {"residual": torch.zeros(2, 3)}}
    return {**state, "parameters": {**state["parameters"], "0.weight": entry}}


@pytest.mark.full("further")
@ranks(2)
def test_states_that_do_not_fit() -> None:
    world = fd.init()
    job = begin(fd.Plan(codec="sign"))
    train(job, range(2))
    state = through_a_file(fd.exchange_state(job[0]))
    both = [{**state, "rank": 0}, {**state, "rank": 1}]
    left = mean_left(job[0], "residual")
    torn = {**state, "parameters": {"0.weight": {"codec": "sign"}}}
    for given, text in [
        (renamed(state), r"the model has no parameter '9\.weight'; load it into the model"),
        (reshaped(state), r"residual of '0\.weight' has shape \(2, 3\), but the parameter has \(129, 127\)"),
        ({**state, "version": 2}, r"version 2, and this farandole knows up to 1; load it with"),
        ({**state, "size": 3}, r"saved by 3 ranks, but there are 2 now; give the list of all 3 ranks' states"),
        ({**state, "rank": 1 - world.rank}, rf"rank {1 - world.rank}'s, given to rank {world.rank}; give each"),
        ({"model": 1}, "a dict without a version; give what"),
        ({"version": 1, "rank": 0}, "no size of type int"),
        (torn, r"the entry of '0\.weight' has no scale of type int"),
        ("state.pt", "expected a dict or a list of dicts, got str"),
        ([*both, {}], "a dict without a version"),
        ([both[0], "x"], "got str"),
        ([both[1], both[0]], "the states of ranks 1 of 2, 0 of 2; give the states of all 2 ranks, in order"),
        ([both[0]], "the states of ranks 0 of 2"),
        ([both[0], renamed(both[1])], r"rank 0's and rank 1's differ in '2\.weight'"),
        ([both[0], reshaped(both[1])], r"residual of '0\.weight' has shape \(2, 3\) on rank 1 and \(129, 127\)"),
        ([reshaped(both[0]), reshaped(both[1])], r"shape \(2, 3\), but the parameter has \(129, 127\)"),
    ]:
        with pytest.raises(ConfigError, match=text):
            fd.load_exchange_state(job[0], given)  # type: ignore[arg-type]
    assert all(torch.equal(value, left[name]) for name, value in mean_left(job[0], "residual").items())
    exact, _ = begin(fd.Plan(codec="sign", codec_for={"0.*": "none"}))
    with pytest.raises(ConfigError, match=r"'0\.weight' used codec sign.*, and has none by this plan"):
        fd.load_exchange_state(exact, state)


@pytest.mark.full("further")
@ranks(4)
def test_a_slice_of_other_buckets_needs_the_list() -> None:
    on_two_hosts()
    fd.init()
    job = begin(fd.Plan(codec="int8"))
    assert the_reducer(job[0]).route == "hierarchical"
    train(job, range(1))
    state = fd.exchange_state(job[0])
    text = r"the route or the buckets changed.*give the list of all ranks' states, in order of rank"
    for plan in (
        fd.Plan(codec="int8", route="flat"),
        fd.Plan(codec="int8", bucket_bytes=1024, first_bucket_bytes=1),
    ):
        other = begin(plan)
        train(other, range(1))
        left = mean_left(other[0], "residual")
        with pytest.raises(ConfigError, match=text):
            fd.load_exchange_state(other[0], state)
        assert all(torch.equal(value, left[name]) for name, value in mean_left(other[0], "residual").items())


@ranks(2)
def test_a_state_that_cannot_be_saved_is_named() -> None:
    fd.init()
    job = begin(fd.Plan(codec=f"{HERE}.careless"))
    train(job, range(1))
    with pytest.raises(
        ConfigError,
        match=r"careless: 'histogram' of its state is a Tensor of shape \(7,\), which",
    ):
        fd.exchange_state(job[0])
