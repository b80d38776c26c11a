"""`fd.accumulate`: the loop says which backward passes are not exchanged yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..comm.world.world import world
from ..core.vocabulary.errors import ConfigError
from ..parallel.model import DistributedModel


@contextmanager
def accumulate(hold: bool = True) -> Iterator[None]:
    """Keep the gradients of the backward passes inside on this rank; the first pass outside exchanges them too.

    As ``no_sync`` of DistributedDataParallel: one exchange for several micro-batches instead of one for each. It
    applies to all distributed models. Without a pass outside, the optimizer's step exchanges them. Until then
    ``parameter.grad`` holds this rank's own gradients, so clip and read gradients after a pass outside. The loop
    divides the loss, as in one process. All ranks hold the same passes.

    Args:
        hold: if False, the context does nothing: ``with fd.accumulate((i + 1) % 4 != 0):``.

    Raises:
        ConfigError: `hold` is no bool, the context is inside another one, or the plan's ``accumulate`` is above 1.
        An optimizer's step inside raises it, too.
        Mismatch: at the exchange, on every rank, when the ranks have accumulated different numbers of passes.
    """
    session = world().session
    if not isinstance(hold, bool):
        raise ConfigError(
            f"accumulate: hold is a {type(hold).__name__}, expected True or False",
            remedy="with fd.accumulate((i + 1) % 4 != 0): loss.backward()",
        )
    if session.holds_passes:
        raise ConfigError("accumulate: the context is inside another fd.accumulate", remedy="enter it once a pass")
    for model in DistributedModel.all_of(world()):
        plan = DistributedModel.of(model).plan
        if plan is not None and plan.accumulate != 1:
            raise ConfigError(
                f"accumulate: the plan says accumulate = {plan.accumulate}, and the loop holds passes itself",
                remedy="use one of the two",
            )
    session.hold_passes(hold)
    try:
        yield
    finally:
        session.hold_passes(False)
