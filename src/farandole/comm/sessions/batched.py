"""Several encodings side by side as one: their messages travel together."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from ..messages.message import Encoded, Encoding, Message


def fuse(encodings: Sequence[Encoding]) -> Generator[Message, torch.Tensor, list[Encoded]]:
    """Run `encodings`, whose messages are all ``all_reduce``, with one message a round.

    Two hundred matrices then cost two rounds, not four hundred. Returns what each one does.
    """
    results: list[Encoded | None] = [None] * len(encodings)
    received: list[torch.Tensor | None] = [None] * len(encodings)
    waiting = list(range(len(encodings)))
    while True:
        messages: list[tuple[int, Message]] = []
        for index in waiting:
            tensor = received[index]
            try:
                message = next(encodings[index]) if tensor is None else encodings[index].send(tensor)
            except StopIteration as end:
                results[index] = end.value
            else:
                if message.operation != "all_reduce":
                    raise ValueError(f"a matrix codec yielded {message.operation!r}, expected only 'all_reduce'")
                messages.append((index, message))
        if not messages:
            return [result for result in results if result is not None]
        total = yield Message(torch.cat([message.tensor.reshape(-1) for _, message in messages]), "all_reduce")
        offset = 0
        for index, message in messages:
            count = message.tensor.numel()
            received[index] = total[offset : offset + count].view(message.tensor.shape)
            offset += count
        waiting = [index for index, _ in messages]
