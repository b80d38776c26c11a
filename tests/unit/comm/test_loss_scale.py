"""By what the scale of losses has changed since the last exchange."""

from __future__ import annotations

from farandole.comm.engine.grad_ownership import LossScale


def test_the_change_since_the_last_exchange() -> None:
    scale, now = LossScale(), [256.0]
    assert scale.change() == 1.0, "nobody scales"
    scale.follow(lambda: now[0])
    assert scale.change() == 1.0
    now[0] = 512.0
    assert scale.change() == 2.0
    assert scale.change() == 1.0, "it was taken into account"
    now[0] = 128.0
    assert scale.change() == 0.25


def test_a_scaler_that_is_gone_and_another_one() -> None:
    scale, now = LossScale(), [256.0]
    scale.follow(lambda: now[0])
    now[0] = 0.0
    assert scale.change() == 1.0
    now[0] = 512.0
    assert scale.change() == 2.0, "since the last one that was known"
    unknown = LossScale()
    unknown.follow(lambda: now[0] if now[0] > 600 else 0.0)
    assert unknown.change() == 1.0
    now[0] = 1024.0
    assert unknown.change() == 1.0, "there is nothing to compare it with"
    scale.follow(lambda: 64.0)  # the gradients of the last exchange were in its units already
    assert scale.change() == 1.0


def test_scales_below_one_change_too() -> None:
    scale, now = LossScale(), [0.5]
    scale.follow(lambda: now[0])
    now[0] = 0.125
    assert scale.change() == 0.25
    now[0] = 0.25
    assert scale.change() == 2.0
