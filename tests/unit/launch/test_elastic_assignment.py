"""Who is in the next generation, with which rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farandole.launch.elastic.control import NO_STATE
from farandole.launch.elastic.membership import Worker, assign, choose, update_kind, vacancies

HOSTS = ["a", "b", "c"]
workers = st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(NO_STATE, 3)), min_size=1, max_size=9).map(
    lambda found: [Worker(i, host, progress) for i, (host, progress) in enumerate(found)]
)
slots = st.dictionaries(st.sampled_from(HOSTS), st.integers(0, 4))
limits = st.none() | st.integers(1, 8)


@given(workers)
def test_ranks_are_a_row_and_hosts_are_together(candidates: list[Worker]) -> None:
    places = assign(candidates)
    seats = list(places.values())
    assert [seat.rank for seat in seats] == list(range(len(candidates)))
    assert sorted(places) == [each.number for each in candidates]
    for seat in seats:
        here = [other for other in seats if other.host_name == seat.host_name]
        assert [other.local_rank for other in here] == list(range(seat.local_size))
        assert here[-1].rank - here[0].rank == seat.local_size - 1
        assert {other.node_rank for other in here} == {seat.node_rank}
        assert seat.node_count == len({other.host_name for other in seats})
        assert seat.size == len(candidates)
        across = [other for other in seats if other.local_rank == seat.local_rank]
        cross_rank, cross_size = seat.cross()
        assert (across[cross_rank], len(across)) == (seat, cross_size)


@given(workers)
def test_rank_0_has_the_newest_state_and_is_the_oldest_of_those(candidates: list[Worker]) -> None:
    first = next(each for each in candidates if each.number == next(iter(assign(candidates))))
    newest = [each for each in candidates if each.progress == max(other.progress for other in candidates)]
    assert first == min(newest, key=lambda each: each.number)


@given(workers, slots, limits)
def test_the_choice_keeps_to_slots_and_limit(
    candidates: list[Worker], slots: dict[str, int], limit: int | None
) -> None:
    choice = choose(candidates, slots, limit)
    assert sorted([*choice.members, *choice.leaving], key=lambda c: c.number) == candidates
    assert limit is None or len(choice.members) <= limit
    members = list(choice.members)
    if [each for each in members if each.progress > NO_STATE] == members[-1:]:
        del members[-1:]  # it may be one that should leave, and alone has the state
    for host in HOSTS:
        assert sum(each.host == host for each in members) <= slots.get(host, 0)


@given(workers, slots, limits)
def test_the_state_is_never_sent_away_while_anybody_stays(
    candidates: list[Worker], slots: dict[str, int], limit: int | None
) -> None:
    choice = choose(candidates, slots, limit)
    best = max(each.progress for each in candidates)
    if choice.members and best > NO_STATE:
        assert max(each.progress for each in choice.members) > NO_STATE


def test_survivors_keep_their_order_and_new_ones_come_last() -> None:
    alive = [
        Worker(1, "a", 5),
        Worker(2, "b", 5),
        Worker(3, "b", 5),
        Worker(7, "a"),
        Worker(8, "c"),
    ]
    assert [(worker, place.host_name) for worker, place in assign(alive).items()] == [
        (1, "a"), (7, "a"), (2, "b"), (3, "b"), (8, "c"),
    ]  # fmt: skip


def test_a_survivor_with_an_older_commit_is_not_rank_0() -> None:
    assert next(iter(assign([Worker(0, "a", 4), Worker(1, "b", 5)]))) == 1


def test_a_host_that_hands_over_stays_for_one_generation() -> None:
    old, new = Worker(0, "a", 5), Worker(1, "b")
    choice = choose([old, new], {"b": 1}, None)
    assert set(choice.members) == {old, new}
    assert choose([old, Worker(1, "b", 5)], {"b": 1}, None).leaving == (old,)


@given(slots, slots, st.sets(st.sampled_from(HOSTS)), limits)
def test_new_workers_fill_open_hosts_only(
    running: dict[str, int], slots: dict[str, int], opened: set[str], limit: int | None
) -> None:
    found = vacancies(running, slots, opened, limit)
    assert set(found) <= opened
    for host in set(found):
        assert running.get(host, 0) + found.count(host) <= slots[host]
    assert not found or limit is None or sum(running.values()) + len(found) <= limit


def test_kinds_of_change() -> None:
    assert [update_kind([1, 2], after) for after in ([1, 2], [1], [1, 2, 3], [1, 3])] == [0, 1, 2, 3]
