"""What a group's queue of calls holds on to."""

from __future__ import annotations

import gc
import threading
import weakref

import torch

from farandole.comm.backend.calls import CallQueue, GroupWork, QueuedCall


def test_who_has_waited_alone_holds_the_tensor() -> None:
    """A gradient that the group's thread still held would be copied by whoever keeps to what is their own."""
    queue, may_leave, is_told = CallQueue(None), threading.Event(), threading.Event()
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    work = GroupWork("all_reduce of 3 x float32", 0, [tensor])

    def perform(tensor: torch.Tensor = tensor) -> None:
        tensor.mul_(2)

    work_end = work.end

    def end(problem: BaseException | None) -> None:
        assert problem is None
        work_end.tell()
        is_told.set()
        assert may_leave.wait(20)  # as a thread does that is not given the processor

    call = QueuedCall(perform, end)
    del perform
    try:
        queue.submit(call, is_async=True)
        assert is_told.wait(20)
        assert work.wait()
        assert tensor.tolist() == [2.0, 2.0, 2.0]
        del work, tensor, call
        gc.collect()
        assert alive() is None, "the queue holds a tensor whose call is over"
    finally:
        may_leave.set()
        queue.close()
