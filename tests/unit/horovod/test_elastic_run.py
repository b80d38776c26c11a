"""`run_fn` and the states, with pretend ranks: who is asked what, in which order, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # sets a variable of the environment when an optimizer is first made

from farandole.core.vocabulary.errors import PeerLost
from farandole.horovod.common.elastic import HostUpdateResult, ObjectState, State, run_fn
from farandole.horovod.common.exceptions import HorovodInternalError, HorovodMismatchError, HostsUpdatedInterrupt
from farandole.horovod.torch.elastic import TorchState
from farandole.horovod.torch.elastic.state import (
    ModelStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)


def alone(obj: Any) -> Any:
    return obj


class Diary(State):
    """Writes down what it is asked to do."""

    def __init__(self) -> None:
        super().__init__(alone, lambda: 0)
        self.lines: list[str] = []

    def save(self) -> None:
        self.lines.append("save")

    def restore(self) -> None:
        self.lines.append("restore")

    def sync(self) -> None:
        self.lines.append("sync")

    def reset(self) -> None:
        self.lines.append("reset")


def play(*events: BaseException | str) -> tuple[Diary, Callable[[], Any]]:
    """Return a state, and a call that meets the exceptions in turn and at last returns a value."""
    state, left = Diary(), list(events)

    def body(state: Diary) -> str:
        state.lines.append("body")
        event = left.pop(0)
        if isinstance(event, BaseException):
            raise event
        return event

    wrapped = run_fn(body, lambda: state.lines.append("meet"))
    return state, lambda: wrapped(state)


def test_a_failure_restores_meets_and_copies() -> None:
    state, call = play(HorovodInternalError("gone"), "done")
    assert call() == "done"
    assert state.lines == ["sync", "body", "restore", "meet", "reset", "sync", "body"]


def test_an_error_of_our_own_engine_is_a_failure_too() -> None:
    state, call = play(PeerLost("gone", rank=0, operation="x"), "done")
    assert call() == "done"
    assert "restore" in state.lines


@pytest.mark.parametrize(("skip", "after"), [(True, []), (False, ["sync"])])
def test_hosts_that_change_keep_what_there_is(skip: bool, after: list[str]) -> None:
    state, call = play(HostsUpdatedInterrupt(skip), "done")
    assert call() == "done"
    assert state.lines == ["sync", "body", "meet", "reset", *after, "body"]


def test_a_failure_after_a_skipped_copy_copies_again() -> None:
    state, call = play(HostsUpdatedInterrupt(True), HorovodInternalError("gone"), "done")
    call()
    assert state.lines[-3:] == ["reset", "sync", "body"]


def test_callbacks_run_after_the_reset() -> None:
    state, call = play(HorovodInternalError("gone"), "done")
    state.register_reset_callbacks([lambda: state.lines.append("callback")])
    call()
    assert state.lines[state.lines.index("reset") + 1] == "callback"


def test_other_errors_are_the_programs() -> None:
    state, call = play(ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        call()
    assert state.lines == ["sync", "body"]


def test_the_same_mismatch_twice_is_raised() -> None:
    _, call = play(
        HorovodMismatchError("rank 1, gradient: shapes"), HorovodMismatchError("rank 0, gradient: shapes"), "done"
    )
    with pytest.raises(HorovodMismatchError, match="came again after the last commit was restored"):
        call()


def test_a_mismatch_after_progress_or_another_one_is_tried_again() -> None:
    state = Diary()

    def body(state: Diary) -> str:
        state.commit()
        if state._commits < 4:
            raise HorovodMismatchError("gradient: shapes")
        return "done"

    assert run_fn(body, lambda: None)(state) == "done"
    _, call = play(*[HorovodMismatchError(f"other {i}") for i in range(4)], "done")
    assert call() == "done"


def test_messages_on_hosts_interrupt_at_the_commit_after_it_is_saved() -> None:
    state = Diary()
    state.commit()
    for kinds, skip in (
        ([HostUpdateResult.removed], True),
        ([HostUpdateResult.added], False),
        ([HostUpdateResult.added, HostUpdateResult.removed], False),
    ):
        begin = state._last_updated_timestamp
        for i, kind in enumerate(kinds, start=1):
            state.on_hosts_updated(begin + i, int(kind))
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync is skip
        assert state.lines[-1] == "save"
        state.commit()
    state.on_hosts_updated(0.5, 1)
    state.commit()  # older than what was acted on


def test_rank_0_decides_for_all() -> None:
    state = Diary()
    state._bcast_object = lambda mine: (0.0, 5.0, 1)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state._bcast_object = lambda mine: (5.0, 5.0, 0)
    state.on_hosts_updated(9.0, 2)
    state.check_host_updates()


def test_object_state_keeps_copies() -> None:
    state: Any = ObjectState(alone, lambda: 0, epoch=1, losses=[1.0])
    state.epoch = 5
    state.losses.append(2.0)
    state.restore()
    assert (state.epoch, state.losses) == (1, [1.0])
    state.losses.append(3.0)
    state.save()
    state.losses.append(4.0)
    state.restore()
    state.restore()
    assert state.losses == [1.0, 3.0]


def test_object_state_takes_what_rank_0_has() -> None:
    state: Any = ObjectState(lambda mine: {"epoch": 7}, lambda: 1, epoch=1)
    state.sync()
    state.epoch = 9
    state.restore()
    assert state.epoch == 7


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, TorchState]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, TorchState(model=model, optimizer=optimizer, batch=0)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))).pow(2).sum().backward()
    optimizer.step()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for each in optimizer.state_dict()["state"].values() for v in each.values()]
    return [tensor.detach().clone() for tensor in [*model.state_dict().values(), *state]]


def test_restore_gives_the_last_commit_bitwise_as_often_as_asked() -> None:
    model, optimizer, state = make()
    step(model, optimizer, 1)
    state.save()
    kept = everything(model, optimizer)
    for seed in (2, 3):
        step(model, optimizer, seed)
        optimizer.param_groups[0]["lr"] = 99.0
        state.restore()
        found = everything(model, optimizer)
        assert len(found) == len(kept)
        assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_commit_that_fails_leaves_the_one_before_whole() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: object) -> Stubborn:
            raise MemoryError("no room")

    model, optimizer, state = make()
    kept = everything(model, optimizer)
    step(model, optimizer, 1)
    state.batch = Stubborn()
    with pytest.raises(MemoryError):
        state.save()
    state.restore()
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), kept, strict=False))
    assert state.batch == 0  # type: ignore[attr-defined]


def test_a_copy_that_fails_half_way_leaves_the_commit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, state = make()
    step(model, optimizer, 1)
    state.save()
    kept = everything(model, optimizer)

    def overwrite(tensors: dict[str, torch.Tensor], root_rank: int) -> None:
        for tensor in tensors.values():
            tensor.zero_()

    def dies(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
        raise HorovodInternalError("gone")

    monkeypatch.setattr("farandole.horovod.torch.elastic.state.broadcast_parameters", overwrite)
    monkeypatch.setattr("farandole.horovod.torch.elastic.state.broadcast_optimizer_state", dies)
    with pytest.raises(HorovodInternalError):
        state.sync()
    assert not all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), kept, strict=True))
    state.restore()
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), kept, strict=True))


def test_setting_an_attribute_replaces_what_is_kept() -> None:
    _, _, state = make()
    other = torch.nn.Linear(2, 2)
    state.model = other
    before = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert torch.equal(other.weight, before)


def test_handlers_of_ones_own() -> None:
    class Counter:
        count = 0

    class CounterHandler(StateHandler):
        kept = 0

        def save(self) -> None:
            self.kept = self.value.count

        def restore(self) -> None:
            self.value.count = self.kept

        def sync(self) -> None:
            self.save()

    before = get_handler_registry()
    assert before[0] == (torch.nn.Module, ModelStateHandler)
    set_handler_registry([*before, (Counter, CounterHandler)])
    try:
        counter = Counter()
        state = TorchState(counter=counter)
    finally:
        set_handler_registry(before)
    counter.count = 3
    state.save()
    counter.count = 5
    state.restore()
    assert counter.count == 3
