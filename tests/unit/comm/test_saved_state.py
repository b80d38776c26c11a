"""What codecs keep, exported and restored without a world: what fits, what waits, and what is said of the rest."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch

from farandole.comm.codecs import saved_state
from farandole.comm.codecs.codec import leaves
from farandole.comm.codecs.registry import CodecInstance, make_codec
from farandole.comm.codecs.saved_state import check, common_part, export, merge, restore
from farandole.comm.codecs.units import CodedFlat, FlatPart
from farandole.comm.messages import GroupRank
from farandole.comm.transport.rank_group import RankGroup
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import ConfigError

SHAPES = {"a": (3, 5), "b": (4,), "c": (2, 6)}
OFFSETS = (0, 16, 24)
ELEMENTS = 64


def coded(codec: str | CodecInstance, rank: int = 0, **options: Any) -> CodedFlat:
    """Return the layout of three parameters with gaps, and states whose values tell where they are from."""
    instance = make_codec(CodecSpec.parse(codec)) if isinstance(codec, str) else codec
    shapes = [tuple(shape) if instance.granularity == "segment" else (4, 4) for shape in SHAPES.values()]
    offsets = OFFSETS if instance.granularity == "segment" else (0, 16, 32)
    parts = [
        FlatPart(shape, torch.empty(shape).stride(), offset) for shape, offset in zip(shapes, offsets, strict=True)
    ]
    made = CodedFlat(instance, RankGroup((0, 1), rank), torch.zeros(ELEMENTS), parts, **options)
    for state in made.states.current.values():
        for key, tensor in leaves(state).items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + len(key))
    return made


def states_of(made: CodedFlat) -> list[dict[str, Any]]:
    return [leaves(state) for state in made.states.current.values()]


def test_what_is_exported_of_each_parameter_and_behind_it() -> None:
    made = coded("topk:0.1,momentum=0.5,warmup_steps=4")
    entries = export(made, list(SHAPES))
    assert list(entries) == list(SHAPES)
    for i, (name, entry) in enumerate(entries.items()):
        assert (entry["scale"], entry["place"]) == (1, [OFFSETS[i], ELEMENTS, 0, ELEMENTS])
        assert sorted(entry["elements"]) == ["residual", "velocity"]
        count = torch.Size(SHAPES[name]).numel()
        for key, tensor in entry["elements"].items():
            expected = torch.arange(count) + OFFSETS[i] + len(key)
            assert torch.equal(tensor, expected.view(SHAPES[name]).float())
        assert [len(entry["padding"][key]) for key in ("residual", "velocity")] == [[1, 4, 28][i]] * 2
        assert [sorted(numbers) for numbers in entry["numbers"]] == [["turn", "warm_up_step"]]
        assert entry["others"] == {}
    entries["a"]["elements"]["residual"].fill_(99.0)
    assert not bool((states_of(made)[0]["residual"] == 99.0).any()), "it is a copy"
    assert export(coded("none"), list(SHAPES)) == {}


def test_padding_is_exported_only_where_it_is_not_zero() -> None:
    made = coded("int8")
    states_of(made)[0]["residual"].zero_()[17 + 3] = 7.0
    entries = export(made, list(SHAPES))
    assert {name: list(entry["padding"]) for name, entry in entries.items()} == {
        "a": [],
        "b": ["residual"],
        "c": [],
    }


class Strange(NamedTuple):
    what: Any


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        (torch.zeros(7), r"codec int8: 'what' of its state is a Tensor of shape \(7,\), which cannot be saved"),
        (
            "words",
            r"'what' of its state is a str, which cannot be saved; .* of the gradient's shape, here \(64,\)",
        ),
    ],
)
def test_state_that_cannot_be_saved_is_named(kept: Any, text: str) -> None:
    made = coded("int8")
    made.states.current[0] = Strange(kept)
    with pytest.raises(ConfigError, match=text):
        export(made, list(SHAPES))


def test_a_unit_without_a_tensor_counts_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    segments_of(monkeypatch, 32)
    made = coded("int8")
    made.states.current = {0: Strange(None), 1: Strange(torch.ones(32))}
    entries = export(made, list(SHAPES))
    (first, *_, last) = (entry["elements"]["what"].flatten().tolist() for entry in entries.values())
    assert (first, last) == ([0.0] * 15, [0.0] * 8 + [1.0] * 4)


@pytest.mark.parametrize(("number", "kind"), [(True, bool), (3, int), (0.5, float)])
def test_numbers_are_saved_as_plain_ones(number: Any, kind: type) -> None:
    made = coded("int8")
    made.states.current[0] = Strange(number)
    (saved,) = export(made, list(SHAPES))["a"]["numbers"]
    assert (saved, type(saved["what"])) == ({"what": number}, kind)


# -- restored --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec", ["topk:0.1,momentum=0.5,warmup_steps=4", "int8:rounding=stochastic", "powersgd:2"]
)
def test_the_same_codec_takes_all_of_it_back(codec: str) -> None:
    made, fresh = coded(codec), coded(codec)
    for k, state in made.states.current.items():
        for key, value in leaves(state).items():
            if not isinstance(value, torch.Tensor):
                made.states.load(k, made.like_unit(k), {**leaves(state), key: 5})
    for state in states_of(fresh):
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(-1.0)
    entries = export(made, list(SHAPES))
    assert [list(entry["others"]) for entry in entries.values()] == [["q"] if "sgd" in codec else []] * 3
    for entry in copy.copy(entries).values():
        for tensor in entry["others"].values():
            assert all(tensor.data_ptr() != state["q"].data_ptr() for state in states_of(made)), "it is a copy"
    waiting = {**copy.deepcopy(entries), "elsewhere": entries["a"]}
    restore([(fresh, list(SHAPES))], waiting)
    assert list(waiting) == ["elsewhere"], "what is taken is taken away"
    for mine, other in zip(states_of(fresh), states_of(made), strict=True):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key
    fresh.states.restore()
    assert torch.equal(states_of(fresh)[0]["residual"], states_of(made)[0]["residual"]), "also as what was before"


def test_another_codec_takes_only_what_was_not_sent() -> None:
    made = coded("topk:0.1,momentum=0.5,warmup_steps=4")
    for k in range(1):
        made.states.load(k, made.like_unit(k), {**states_of(made)[k], "turn": 7, "warm_up_step": 3})
    other = coded("randomk:0.1,momentum=0.5")
    numbers = {key: value for key, value in states_of(other)[0].items() if not isinstance(value, torch.Tensor)}
    entries = export(made, list(SHAPES))
    for entry in entries.values():
        entry["numbers"] = [dict.fromkeys(numbers, 77)]
    restore([(other, list(SHAPES))], entries)
    assert torch.equal(states_of(other)[0]["residual"], states_of(made)[0]["residual"]), "padding as well"
    assert not bool(states_of(other)[0]["velocity"].any()), "it is of other units"
    assert {key: states_of(other)[0][key] for key in numbers} == numbers, "they count that codec's steps"


def test_options_of_the_same_codec_may_change_and_its_numbers_stay() -> None:
    made, other = coded("topk:0.1,warmup_steps=4"), coded("topk:0.2,warmup_steps=9")
    made.states.load(0, made.like_unit(0), {**states_of(made)[0], "warm_up_step": 3})
    restore([(other, list(SHAPES))], export(made, list(SHAPES)))
    assert states_of(other)[0]["warm_up_step"] == 3
    assert torch.equal(states_of(other)[0]["residual"], states_of(made)[0]["residual"])


def test_parameters_without_an_entry_begin_anew() -> None:
    made = coded("int8")
    entries = export(made, list(SHAPES))
    del entries["b"]
    fresh = coded("int8")
    restore([(fresh, list(SHAPES))], entries)
    residual, old = states_of(fresh)[0]["residual"], states_of(made)[0]["residual"]
    assert torch.equal(residual[:16], old[:16])
    assert not bool(residual[16:24].any())
    assert torch.equal(residual[24:], old[24:])


def test_padding_is_of_one_layout_only() -> None:
    entries = export(coded("int8"), list(SHAPES))
    for entry in entries.values():
        entry["place"][1] += 1
    fresh = coded("int8")
    restore([(fresh, list(SHAPES))], entries)
    residual = states_of(fresh)[0]["residual"]
    assert residual[14:16].tolist() == [14 + 8, 0.0]
    assert not bool(residual[36:].any())


def segments_of(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr("farandole.comm.codecs.units.segment_elements", lambda *_: elements)


def test_numbers_of_each_segment_go_back_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 12: "a" lies in two, "b" in one and "c" in four, of which it shares the first with "b"."""
    segments_of(monkeypatch, 12)
    made = coded("topk:0.1,warmup_steps=4")
    assert [made.units_of(i) for i in range(3)] == [[0, 1], [1], [2, 3, 4, 5]]
    for k in range(6):
        made.states.load(k, made.like_unit(k), {**states_of(made)[k], "warm_up_step": 10 + k})
    entries = export(made, list(SHAPES))
    steps = [[each["warm_up_step"] for each in entry["numbers"]] for entry in entries.values()]
    assert steps == [[10, 11], [11], [12, 13, 14, 15]]
    fresh = coded("topk:0.1,warmup_steps=4")
    entries["b"]["numbers"] = [{"warm_up_step": 99}]
    entries["c"]["numbers"] = entries["c"]["numbers"][:2]
    restore([(fresh, list(SHAPES))], entries)
    found = [state["warm_up_step"] for state in states_of(fresh)]
    assert found == [10, 11, 12, 13, 13, 13], (
        "the parameter before it in a segment counts; the last one is for more"
    )
    for mine, other in zip(states_of(fresh), states_of(made), strict=True):
        assert torch.equal(mine["residual"], other["residual"])


def test_a_slice_goes_back_only_to_where_it_is_from() -> None:
    """Unless every rank carries all, or the entry is of no place."""
    whole, cut = coded("int8"), coded("int8", local_size=2, bounds=(0, 32))
    entries = export(cut, list(SHAPES))
    assert {entry["scale"] for entry in entries.values()} == {2}
    assert torch.equal(entries["a"]["elements"]["residual"].flatten(), torch.arange(15) + 8.0)
    assert not bool(entries["c"]["elements"]["residual"].view(-1)[8:].any()), "another rank has the rest"
    restore([(coded("int8", local_size=2, bounds=(0, 32)), list(SHAPES))], dict(entries))
    for other in (
        coded("int8", local_size=2, bounds=(32, 64)),
        whole,
        coded("int8", local_size=4, bounds=(0, 32)),
    ):
        before = copy.deepcopy(states_of(other))
        with pytest.raises(ConfigError, match=r"the route or the buckets changed: \[first element of 'a'"):
            restore([(other, list(SHAPES))], entries)
        assert torch.equal(states_of(other)[0]["residual"], before[0]["residual"]), "nothing was changed"
        assert list(entries) == list(SHAPES)
    fits = export(whole, list(SHAPES))
    with pytest.raises(ConfigError, match=r"were .* and 1, are .* and 2"):
        restore([(cut, list(SHAPES))], fits)
    restore([(cut, list(SHAPES))], {name: {**entry, "place": []} for name, entry in fits.items()})


# -- of several ranks ------------------------------------------------------------------------------


def test_merged_entries_are_the_mean_of_what_is_missing() -> None:
    one, two = (export(coded("topk:0.1,warmup_steps=4", rank), list(SHAPES))["b"] for rank in range(2))
    two["elements"]["residual"].mul_(3)
    two["scale"] = 2
    one["numbers"], two["numbers"] = (
        [{"warm_up_step": 4, "seed": 1, "mine": 0}, {"warm_up_step": 9}],
        [{"warm_up_step": 4, "seed": 2}],
    )
    merged = merge([one, two])
    assert torch.equal(merged["elements"]["residual"], one["elements"]["residual"] * (1 + 6) / 2)
    assert merged["elements"]["residual"].dtype == torch.float32
    assert merged["numbers"] == [{"warm_up_step": 4}], "what differs is a rank's own"
    assert (merged["codec"], merged["scale"], merged["place"], merged["padding"]) == (one["codec"], 1, [], {})
    alone = merge([one, {**two, "elements": {}, "numbers": []}])
    assert torch.equal(alone["elements"]["residual"], one["elements"]["residual"] / 2), "who has none has zeros"
    assert alone["numbers"] == [one["numbers"][0]]
    assert merge([{**one, "numbers": []}])["numbers"] == [{}]


def test_what_must_be_the_same_on_all_ranks_of_an_entry() -> None:
    entry = export(coded("int8:rounding=stochastic"), list(SHAPES))["a"]
    entry["numbers"] = [{"seed": 1, "draws": 2}]
    said = common_part(entry)
    assert said == f'codec {entry["codec"]}, residual, numbers [{{"draws": 2}}]'
    assert common_part({**entry, "numbers": [{"seed": 5, "draws": 2}]}) == said
    assert common_part({**entry, "elements": {}}).startswith(f"codec {entry['codec']}, no tensor, numbers")
    factors = [common_part({**entry, "others": {"q": torch.full((2,), value)}}) for value in (1.0, 1.0, 2.0)]
    assert factors[0] == factors[1] != factors[2]
    assert ", q, residual, numbers" in factors[0]
    assert len(factors[0].rpartition(", factors ")[2]) == 8
    own = {**entry, "codec": "tests.ranks.test_exchange_state.moody"}
    assert common_part(own) == f"codec {own['codec']}, residual", "what its numbers mean is not known"


def test_entries_that_do_not_fit_a_model_are_named() -> None:
    entries = export(coded("int8"), list(SHAPES))
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    codecs = dict.fromkeys(SHAPES, CodecSpec.parse("int8"))
    check(entries, parameters, codecs)
    check({}, parameters, codecs)
    strangers = dict.fromkeys("uvwxy", entries["a"])
    with pytest.raises(ConfigError, match=r"the model has no parameter 'u', 'v', 'w' and 2 more;"):
        check(strangers, parameters, codecs)
    for count, listed in ((3, "'u', 'v', 'w';"), (4, "'u', 'v', 'w' and 1 more;")):
        with pytest.raises(ConfigError, match=f"the model has no parameter {listed}"):
            check(dict(list(strangers.items())[:count]), parameters, codecs)
    with pytest.raises(ConfigError, match=r"'b' used codec int8.*, and has none by this plan"):
        check(entries, parameters, {**codecs, "b": CodecSpec.parse("none")})
    with pytest.raises(ConfigError, match=r"residual of 'c' has shape \(2, 6\), but the parameter has \(6, 2\)"):
        check(entries, {**parameters, "c": torch.nn.Parameter(torch.zeros(6, 2))}, codecs)
    without: Any = {key: part for key, part in entries["a"].items() if key != "others"}
    wrong: Any
    for wrong in ([], {**entries["a"], "scale": 1.5}, without):
        with pytest.raises(ConfigError, match=r"the entry of 'a' has no \w+ of type \w+; give what"):
            check({"a": wrong}, parameters, codecs)
    assert saved_state._KINDS.keys() == entries["a"].keys()


def test_the_group_of_a_state_is_the_one_it_was_made_for() -> None:
    assert coded("int8", 1).states.group == GroupRank(1, 2)
