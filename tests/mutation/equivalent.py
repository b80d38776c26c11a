"""Changes that make no difference any test could see, judged by hand.

By what stood there and what stands there then, as the survivors' list prints them: lines may move, files too. An
entry that no longer matches anything is harmless and is to be deleted.
"""

from __future__ import annotations

_ANY_SEED = "any seed is as good, and all ranks take the same"
_COMMUTES = "an addition of two floats is the same both ways round"
_SAME_AS_SEND = "to send None to a generator is to begin or continue it"
_NO_TICK = "a deadline is not met to the nanosecond"
_SAVES_A_CALL = "what is called does nothing then: the condition keeps a file out of the usual step"
_SET_BEFORE = "it is set before it is read"
_OTHER_PASSES = "all ranks add the same, and other passes still give another number than any steps nearby"
_AT_LEAST_ONE = "a positive share of a positive count, rounded up, is at least one"

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "drawn = torch.rand(_NOISE_ELEMENTS, dtype=torch.float32, generator=torch.Generator().manual_seed(20211))",
        "drawn = torch.rand(_NOISE_ELEMENTS, dtype=torch.float32, generator=torch.Generator().manual_seed(20212))",
    ): _ANY_SEED,
    (
        "generator = torch.Generator().manual_seed(state.get('shared_seed', 0) * 1000003 + draws)",
        "generator = torch.Generator().manual_seed(state.get('shared_seed', 1) * 1000003 + draws)",
    ): _ANY_SEED,
    ("steps == 0 or step > steps", "steps == 1 or step > steps"): "of one step, too, the only density is the last",
    (
        "kept = min(count, max(1, math.ceil(count * density(state))))",
        "kept = min(count, max(0, math.ceil(count * density(state))))",
    ): _AT_LEAST_ONE,
    (
        "kept = min(count, max(1, math.ceil(count * density)))",
        "kept = min(count, max(0, math.ceil(count * density)))",
    ): _AT_LEAST_ONE,
    (
        "return np.flatnonzero(np.unpackbits(coded[:-(-self.count // 8)], count=self.count))",
        "return np.flatnonzero(np.unpackbits(coded[:-(-self.count * 8)], count=self.count))",
    ): "`count` says where to stop",
    (
        "total = total + other[0] if peer > seat.rank else other[0] + total",
        "total = total + other[0] if True else other[0] + total",
    ): _COMMUTES,
    (
        "total = total + other[0] if peer > seat.rank else other[0] + total",
        "total = total + other[0] if False else other[0] + total",
    ): _COMMUTES,
    (
        "total = total + other[0] if peer > seat.rank else other[0] + total",
        "total = total + other[0] if peer >= seat.rank else other[0] + total",
    ): _COMMUTES,
    (
        "turn = state['turn'] = state.get('turn', 0) + 1",
        "turn = state['turn'] = state.get('turn', 1) + 1",
    ): "it may begin with any turn",
    ("self._begin_seconds = 0.0", "pass"): _SET_BEFORE,
    ("job._next < len(job.items)", "False"): "what is not wholly begun has filled the window",
    (
        "return next(self._encoding) if answer is None else self._encoding.send(answer)",
        "return next(self._encoding) if False else self._encoding.send(answer)",
    ): _SAME_AS_SEND,
    (
        "message = next(encodings[index]) if answer is None else encodings[index].send(answer)",
        "message = next(encodings[index]) if False else encodings[index].send(answer)",
    ): _SAME_AS_SEND,
    (
        "message = next(self._stack[-1]) if answer is None else self._stack[-1].send(answer)",
        "message = next(self._stack[-1]) if False else self._stack[-1].send(answer)",
    ): _SAME_AS_SEND,
    (
        "generator = torch.Generator().manual_seed(1000003 * rank + columns)",
        "generator = torch.Generator().manual_seed(1000004 * rank + columns)",
    ): _ANY_SEED,
    ("divisor != 1", "True"): "division by one changes nothing",
    (
        "generator = torch.Generator().manual_seed(state.get('shared_seed', 0) * 1000003 + draws)",
        "generator = torch.Generator().manual_seed(state.get('shared_seed', 0) * 1000004 + draws)",
    ): _ANY_SEED,
    (
        "steps = torch.ldexp(torch.ones_like(scales), (exponents.view(-1) - 14).clamp_(-120, 120))",
        "steps = torch.ldexp(torch.ones_like(scales), (exponents.view(-1) - 14).clamp_(-120, 121))",
    ): "no float32 has an exponent of 134",
    (
        "kept >= values.size or values.size <= 2 * _SAMPLE_ELEMENTS",
        "kept >= values.size or values.size < 2 * _SAMPLE_ELEMENTS",
    ): "where a sample begins to pay is not known to one element",
    (
        "self.has_more_to_send and (left := (deadline - time.monotonic())) > 0",
        "self.has_more_to_send and (left := (deadline - time.monotonic())) >= 0",
    ): _NO_TICK,
    ("time.monotonic() > deadline", "time.monotonic() >= deadline"): _NO_TICK,
    ("self.waiting_for", "True"): "what has arrived is not waited for by `progress` either",
    ("self._flight: PendingMessage | None = None", "pass"): _SET_BEFORE,
    ("self._steps: int | None = None", "pass"): _SET_BEFORE,
    ("self._marked: Bucket | None = None", "pass"): _SET_BEFORE,
    ("self._set.frozen", "True"): _SAVES_A_CALL,
    ("self._set.carry_over.is_active", "True"): _SAVES_A_CALL,
    ("parts.buckets.carry_over.is_active", "True"): _SAVES_A_CALL,
    ("parts.loss_scale.is_followed", "True"): _SAVES_A_CALL,
    ("parts.nonfinite.undecided", "True"): _SAVES_A_CALL,
    ("self.parts.nonfinite.undecided", "True"): _SAVES_A_CALL,
    ("parts.single.spent is not None", "True"): _SAVES_A_CALL,
    ("bad or parts.nonfinite.is_skipped", "True"): _SAVES_A_CALL,
    ("self._parts.local.aside is not None", "True"): _SAVES_A_CALL,
    ("self._world.groups.sockets.shut_down or self._world.in_forked_child", "True"): _SAVES_A_CALL,
    (
        "steps = None if self._steps is None else self._steps + _PASS * (self._passes - 1)",
        "steps = None if self._steps is None else self._steps - _PASS * (self._passes - 1)",
    ): _OTHER_PASSES,
    (
        "steps = None if self._steps is None else self._steps + _PASS * (self._passes - 1)",
        "steps = None if self._steps is None else self._steps + _PASS * (self._passes + 1)",
    ): _OTHER_PASSES,
    (
        "steps = None if self._steps is None else self._steps + _PASS * (self._passes - 1)",
        "steps = None if self._steps is None else self._steps + _PASS * (self._passes - 0)",
    ): _OTHER_PASSES,
    (
        "not bool((rows[:, :-2] == rows[0, :-2]).all())",
        "not bool((rows[:, :-2] == rows[1, :-2]).all())",
    ): "rows that are all like one of them are all like another",
    (
        "self.elements >= FEW_LARGE_ELEMENTS * len(views)",
        "self.elements > FEW_LARGE_ELEMENTS * len(views)",
    ): "where a call each begins to pay is not known to one element",
    ("parts.in_flight.is_exchanging", "True"): "outside of an exchange no bucket is left to launch",
}
"""Before and after, and the reason."""
