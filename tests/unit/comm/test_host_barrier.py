"""The barrier of one host, in one process."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch

from farandole.comm.transport.host_memory import PAGE_BYTES, HostBarrier, Peer


def test_a_barrier_that_several_threads_close_closes_each_descriptor_once() -> None:
    """A descriptor that is closed twice may be another one's by then."""
    peers = [Peer(rank, "here", os.getpid()) for rank in range(50)]
    files, interval = psutil.Process().num_fds(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(30):
                pages = [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in peers]
                barrier = HostBarrier(peers, 0, pages, timeout_seconds=1.0)
                for closing in [threads.submit(barrier.close) for _ in range(4)]:
                    closing.result()
    finally:
        sys.setswitchinterval(interval)
    assert psutil.Process().num_fds() <= files
