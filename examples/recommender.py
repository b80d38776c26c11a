"""A recommender in real time: it trains on each click once, as it comes, and serves copies that are seconds old.

    python examples/recommender.py
    farandole run -np 2 -- python examples/recommender.py

The clicks are generated: users with tastes, items that come and go and whose appeal changes by the minute. Rows
of users and items lie in `fd.RowTable`s. What serves is a copy, refreshed by the rows that were trained since the
last time. Each batch is predicted by the copy first, then trained on, so every prediction is of clicks it has not
seen. Beside it: the same model, trained on the same clicks by batch, and served from one batch job to the next.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import farandole as fd

USERS, ITEMS, LIVE, TASTES, DIM = 50_000, 4_000, 400, 4, 16
REFRESH_STEPS, JOB_STEPS = 5, 60
"""Steps from one refreshed copy to the next; and from one batch job to the next."""


class Stream:
    """Clicks over time: batch `step` has (users, items, clicks), each (count,), and the true probabilities."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.tastes = torch.randn(USERS, TASTES, generator=random)
        self.features = torch.randn(ITEMS, TASTES, generator=random)
        self.phases = torch.rand(ITEMS, 2, generator=random) * 6.28

    def batch(self, step: int, count: int, part: int) -> tuple[torch.Tensor, ...]:
        random = torch.Generator().manual_seed(step * 1_000 + part)
        users = (USERS * torch.rand(count, generator=random) ** 4).long()
        items = (6 * step + LIVE * torch.rand(count, generator=random) ** 2).long() % ITEMS
        appeal = torch.sin(self.phases[items, 0] + step / (30 + 4 * self.phases[items, 1]))
        chances = torch.sigmoid(2.5 * appeal + 0.5 * (self.tastes[users] * self.features[items]).sum(1) - 0.5)
        return users, items, (torch.rand(count, generator=random) < chances).float(), chances


class Model(nn.Module):
    """Tables and a head; `served` has copies of all that its predictions are made of."""

    def __init__(self, name: str) -> None:
        super().__init__()
        options = {"optimizer": "adagrad:lr=0.1", "init_std": 0.05}
        self.tables = [fd.RowTable(f"{name}.{what}", DIM, **options) for what in ("users", "items")]
        self.head = nn.Linear(3 * DIM, 1)
        self.copies = [fd.RowCopy(DIM) for _ in self.tables]
        self.served_head = nn.Linear(3 * DIM, 1)
        self.head, self.optimizer = fd.distribute(self.head, torch.optim.Adagrad(self.head.parameters(), 0.05))
        for table in self.tables:
            table.attach(self.optimizer)
        self.refreshed_bytes = 0

    def train_on(self, users: torch.Tensor, items: torch.Tensor, clicks: torch.Tensor) -> None:
        scores = score(self.head, *(table(ids) for table, ids in zip(self.tables, (users, items), strict=True)))
        nn.functional.binary_cross_entropy_with_logits(scores, clicks).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def refresh(self) -> None:
        """Bring the served copy up to date: rows that were trained since the last time, and the small head."""
        for table, copy in zip(self.tables, self.copies, strict=True):
            changes = table.changes_since(copy.mark)
            copy.update(changes)
            self.refreshed_bytes += changes.nbytes
        self.served_head.load_state_dict(self.head.state_dict())

    @torch.no_grad()
    def predict(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        vectors = (copy(ids) for copy, ids in zip(self.copies, (users, items), strict=True))
        return torch.sigmoid(score(self.served_head, *vectors))


def score(head: nn.Module, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    return head(torch.cat([user, item, user * item], 1)).squeeze(1)


def log_loss(chances: torch.Tensor, clicks: torch.Tensor) -> float:
    return nn.functional.binary_cross_entropy(chances, clicks).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--batch", type=int, default=512, help="clicks of a step, of all ranks")
    steps, batch = (parsed := parser.parse_args()).steps, parsed.batch
    world = fd.init()
    torch.manual_seed(0)
    stream, online, by_batch = Stream(), Model("online"), Model("batch")
    losses = {"in real time": 0.0, "by batch": 0.0, "if all were known": 0.0}
    oldest_seconds, counted = 0.0, range(max(JOB_STEPS, steps // 4), steps)  # all have trained by then
    online.refresh()
    by_batch.refresh()
    for step in range(steps):
        users, items, clicks, chances = stream.batch(step, batch // world.size, world.rank)
        if step in counted:
            oldest_seconds = max(oldest_seconds, *(copy.age_seconds for copy in online.copies))
            losses["in real time"] += log_loss(online.predict(users, items), clicks) / len(counted)
            losses["by batch"] += log_loss(by_batch.predict(users, items), clicks) / len(counted)
            losses["if all were known"] += log_loss(chances, clicks) / len(counted)
        online.train_on(users, items, clicks)
        if (step + 1) % REFRESH_STEPS == 0:
            online.refresh()
        if (step + 1) % JOB_STEPS == 0:  # the batch job: each click since the last one, once
            for past in range(step + 1 - JOB_STEPS, step + 1):
                by_batch.train_on(*stream.batch(past, batch // world.size, world.rank)[:3])
            by_batch.refresh()

    known = [table.statistics() for table in online.tables]
    pushed, refreshed = sum(each.pushed_bytes for each in known) / 1e6, online.refreshed_bytes / 1e6
    dense = steps * 4 * DIM * (USERS + ITEMS) / 1e6
    copied = steps // REFRESH_STEPS * sum(map(len, online.copies)) * 4 * DIM / 1e6
    fd.print(f"{sum(each.rows for each in known)} rows after {steps * batch} clicks, {world.size} rank(s)")
    for name, loss in losses.items():
        fd.print(f"log loss of clicks not seen, {name}: {fd.mean(loss):.4f}")
    fd.print(f"served rows are at most {oldest_seconds:.2f} s and {REFRESH_STEPS} steps old")
    fd.print(f"pushed: {pushed:.1f} MB a rank, as dense tensors {dense:.0f} MB: {1 - pushed / dense:.1%} less")
    fd.print(f"refreshed: {refreshed:.1f} MB, as whole copies {copied:.0f} MB: {1 - refreshed / copied:.1%} less")


if __name__ == "__main__":
    main()
