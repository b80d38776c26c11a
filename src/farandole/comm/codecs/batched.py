"""Several encodings side by side as one: their messages travel together."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from ..messages.message import Encoding, Message

Results = list[tuple[torch.Tensor, torch.Tensor]]


def fuse(encodings: Sequence[Encoding]) -> Generator[Message, torch.Tensor, Results]:
    """Run `encodings`, which must all say ``sum`` in every round, with one message a round.

    Two hundred matrices then cost two rounds, not four hundred. Returns each one's (mean, own).
    """
    results: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(encodings)
    answers: list[torch.Tensor | None] = [None] * len(encodings)
    waiting = list(range(len(encodings)))
    while True:
        said: list[tuple[int, Message]] = []
        for index in waiting:
            answer = answers[index]
            try:
                message = next(encodings[index]) if answer is None else encodings[index].send(answer)
            except StopIteration as end:
                results[index] = end.value
            else:
                if message.operation != "sum":
                    raise ValueError(f"a matrix codec said {message.operation!r}: only sums travel together")
                said.append((index, message))
        if not said:
            return [result for result in results if result is not None]
        total = yield Message(torch.cat([message.tensor.reshape(-1) for _, message in said]), "sum")
        offset = 0
        for index, message in said:
            count = message.tensor.numel()
            answers[index] = total[offset : offset + count].view(message.tensor.shape)
            offset += count
        waiting = [index for index, _ in said]
