"""Whole tables as tensors: taken from the shards page by page, and given to any other number of shards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from ..server.channel import ServerMessage
from .links import MOST_MESSAGE_BYTES, RowLinks
from .requests import RowMessages
from .store import owners

_ROWS: Final = ("ids", "rows", "states", "used")
_WAITING: Final = ("waiting_ids", "waiting_counts", "waiting_used")
_SAVED: Final = "saved_seconds"


def take_rows(links: RowLinks) -> dict[str, torch.Tensor]:
    """Return ``ids`` (n,), ``rows`` (n, dim), ``states`` (n, k), ``used`` (n,) in seconds, counts and the time."""
    pages: list[list[torch.Tensor]] = []
    waiting: list[list[torch.Tensor]] = []
    for server in range(links.count):
        of_rows, of_waiting = _take_shard(links, server)
        pages += of_rows
        waiting += [[ids, counts[:, 0], used] for ids, counts, _, used in of_waiting]
    saved = {name: torch.cat([page[at] for page in pages]) for at, name in enumerate(_ROWS)}
    saved |= {name: torch.cat([page[at] for page in waiting]) for at, name in enumerate(_WAITING)}
    return {**saved, _SAVED: torch.tensor([time.time()], dtype=torch.float64)}


def put_rows(exchange: RowMessages, saved: Mapping[str, torch.Tensor], state_width: int) -> str:
    """Replace all rows by what `take_rows` returned; return why that cannot be, and change nothing then."""
    links, dim, dtype = exchange.links, exchange.dim, exchange.dtype
    missing = [name for name in (*_ROWS, *_WAITING, _SAVED) if name not in saved]
    if missing:
        return f"the saved rows have no {missing[0]!r}"
    shapes = tuple(saved["rows"].shape[1:]), tuple(saved["states"].shape[1:])
    if shapes != ((dim,), (state_width,)) or saved["rows"].dtype != dtype:
        return (
            f"saved are rows of {shapes[0]} {saved['rows'].dtype} with states of {shapes[1]}, "
            f"expected ({dim},) {dtype} with ({state_width},)"
        )
    for names in (_ROWS, _WAITING):
        keys, lengths = saved[names[0]], [len(saved[name]) for name in names]
        if (
            len(set(lengths)) > 1
            or keys.dtype != torch.int64
            or bool((keys < 0).any())
            or len(keys.unique()) < len(keys)
        ):
            return f"{names} of {lengths} rows, with ids of {keys.dtype}: expected as many of each, and ids once"
    # Rows are as long from their expiry as when they were saved.
    later = max(0.0, time.time() - float(saved[_SAVED]))
    saved = {**saved, **{name: saved[name] + later for name in (_ROWS[-1], _WAITING[-1])}}
    links.call(dict.fromkeys(range(links.count), ServerMessage({"do": "clear"})), keeps=True)
    at_once = max(1, MOST_MESSAGE_BYTES // ((dim + state_width) * dtype.itemsize + 16))
    for what, names in (("put", _ROWS), ("put_waiting", _WAITING)):
        ids = saved[names[0]].numpy()
        owner = owners(ids, exchange.owner_key, links.count)
        for begin in range(0, len(ids), at_once):
            part = owner[begin : begin + at_once]
            places = {server: begin + np.flatnonzero(part == server) for server in range(links.count)}
            requests = {
                server: ServerMessage({"do": what}, [saved[name][torch.from_numpy(at)] for name in names])
                for server, at in places.items()
                if len(at)
            }
            links.call(requests, keeps=True)
    return ""


def _take_shard(links: RowLinks, server: int) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Return the pages of a shard, from the beginning again where rows have moved meanwhile."""
    while True:
        said = links.call({server: ServerMessage({"do": "look"})}, keeps=False)[server].values
        found: list[list[list[torch.Tensor]]] = []
        is_same = True
        for is_waiting, rows in ((False, said["rows"]), (True, said["counts"])):
            pages = []
            for begin in range(0, max(1, rows), at_once := 1 << 14):
                values = {"do": "page", "waiting": is_waiting, "begin": begin, "rows": min(at_once, rows - begin)}
                reply = links.call({server: ServerMessage(values)}, keeps=False)[server]
                is_same = is_same and reply.values["layout"] == said["layout"]
                pages.append(list(reply.tensors))
            found.append(pages)
        if is_same:
            return found[0], found[1]
