"""Functions in threads, by Horovod's names."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn` with each of `args_list` in threads; return the results by place.

    Without `block_until_all_done` return None at once, and forget results and errors.
    """
    if not args_list:
        return {}
    threads = ThreadPoolExecutor(min(len(args_list), max_concurrent_executions))
    calls = [threads.submit(fn, *arguments) for arguments in args_list]
    threads.shutdown(wait=block_until_all_done)
    return {place: call.result() for place, call in enumerate(calls)} if block_until_all_done else None


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `target` in a thread and return the thread; errors are printed unless `silent`."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, got {type(args).__name__}; for a single argument write (arg,)")

    def call() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                traceback.print_exc()

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `func` in a thread when `event` is set, unless `stop` is set before; return the thread."""

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)
