"""Records how long passes and steps wait for exchanges inside of them: of activations, of updated parameters.

On accelerators such a wait is that of a stream, which the host does not see: nothing is recorded there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...comm.world.world import World
from ...core.vocabulary.events import InnerExchange


@contextmanager
def inner_exchange(here: World, degree: str, sent_bytes: int | Callable[[], int]) -> Iterator[None]:
    """Record the time inside as a wait for the ranks of a degree; of one that succeeded.

    `sent_bytes`: by this rank, of collectives what a ring sends; or what gives it when all is sent.
    """
    if here.device.type != "cpu":
        yield
        return
    begin = time.monotonic()
    yield
    sent = sent_bytes if isinstance(sent_bytes, int) else sent_bytes()
    here.session.recorder.record(InnerExchange(degree, begin, time.monotonic(), sent))
