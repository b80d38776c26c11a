"""The rows of one server: what a pull reads, what a push does. Pure: no socket, no clock of its own.

[Note: admission] An id has its first values from the beginning: they follow from the id. It gets a row, which is
trained, with the push that has its `admit`-th occurrence; until then its gradients are dropped and its occurrences
are counted. So a pull changes nothing, and can be repeated. A row that was not trained for `expire_seconds`, and a
count that was not added to for as long, are as if they had never been.

>>> RowOptimizer.parse("adagrad:lr=0.1")
RowOptimizer(name='adagrad', lr=0.1, eps=1e-10, beta1=0.9, beta2=0.999, weight_decay=0.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import did_you_mean
from .store import RowStore, initial_rows

# The optimizers of rows: what a server does to the rows that a push has gradients of, and to no other.

_KEYS: Final = {
    "sgd": ("lr", "weight_decay"),
    "adagrad": ("lr", "eps", "weight_decay"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay"),
}
_DEFAULT_LR: Final = {"sgd": 0.01, "adagrad": 0.01, "adam": 0.001}
_DEFAULT_EPS: Final = {"sgd": 0.0, "adagrad": 1e-10, "adam": 1e-8}


@dataclass(frozen=True)
class RowOptimizer:
    """A rule and its numbers.

    ``sgd``; ``adagrad``: row-wise, one number a row, the sum of the mean squares of its gradients (TorchRec's
    ``EXACT_ROWWISE_ADAGRAD``); ``adam``: lazy, each row counts its own steps (Kingma and Ba 2015, with the
    corrections of the row's step). `weight_decay` is added to gradients (L2), so it reaches touched rows alone.
    """

    name: str
    lr: float
    eps: float
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    @classmethod
    def parse(cls, text: str) -> RowOptimizer:
        """Read such as ``adam:lr=0.01,beta2=0.99``. Raises `ConfigError` with what is expected."""
        name, _, rest = text.partition(":")
        if name not in _KEYS:
            raise ConfigError(
                f"optimizer of rows {text!r}: expected one of {', '.join(_KEYS)}", remedy=did_you_mean(name, _KEYS)
            )
        made = cls(name, _DEFAULT_LR[name], _DEFAULT_EPS[name])
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key.strip() not in _KEYS[name]:
                raise ConfigError(
                    f"optimizer of rows {text!r}: {name} has no {key.strip()!r}",
                    remedy=did_you_mean(key.strip(), _KEYS[name]),
                )
            try:
                number: Any = float(value)
            except ValueError:
                raise ConfigError(f"optimizer of rows {text!r}: {key} = {value!r}, expected a number") from None
            made = replace(made, **{key.strip(): number})
        made._refuse_wrong_numbers(text)
        return made

    def _refuse_wrong_numbers(self, text: str) -> None:
        for each in fields(self)[1:]:
            value, most = getattr(self, each.name), 1.0 if each.name.startswith("beta") else math.inf
            if not 0 <= value < most:
                expected = "a number from 0 and below 1" if most == 1 else "a finite number from 0"
                raise ConfigError(f"optimizer of rows {text!r}: {each.name} = {value}, expected {expected}")

    def state_width(self, dim: int) -> int:
        """Return how many numbers a row has beside its values."""
        return {"sgd": 0, "adagrad": 1, "adam": 2 * dim + 1}[self.name]

    def update(self, rows: torch.Tensor, states: torch.Tensor, grads: torch.Tensor, lr: float) -> None:
        """Make one step of `rows`, (u, dim), with `states`, (u, `state_width`), in place."""
        if self.weight_decay:
            grads = grads + self.weight_decay * rows
        if self.name == "sgd":
            rows.sub_(grads, alpha=lr)
        elif self.name == "adagrad":
            states += grads.square().mean(1, keepdim=True)
            rows.sub_(grads / (states.sqrt() + self.eps), alpha=lr)
        else:
            dim = rows.shape[1]
            first, second, steps = states[:, :dim], states[:, dim : 2 * dim], states[:, 2 * dim :]
            steps += 1
            first.lerp_(grads, 1 - self.beta1)
            second.mul_(self.beta2).addcmul_(grads, grads, value=1 - self.beta2)
            size = lr / (1 - self.beta1**steps)
            rows.sub_(size * first / ((second / (1 - self.beta2**steps)).sqrt() + self.eps))


DTYPES: Final = ("float32", "float64")
MOST_REMOVED: Final = 1_000_000
"""Ids of removed rows that are remembered for copies; an older copy is told to begin anew."""
_SWEEPS_A_LIFE = 8
_LEAST_COMPACTED = 1024


@dataclass(frozen=True)
class RowRules:
    """What all shards of a table agree on."""

    dim: int
    optimizer: str
    admit: int
    expire_seconds: float | None
    init_std: float
    key: int
    """See `store.key_of`: of the name and the seed."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what is out of range."""
        life = self.expire_seconds
        for is_wrong, text in (
            (self.dim < 1, f"dim = {self.dim}, expected at least 1"),
            (self.admit < 1, f"admit = {self.admit}, expected at least 1"),
            (life is not None and not life > 0, f"expire_seconds = {life}, expected more than 0, or None"),
            (not 0 <= self.init_std < math.inf, f"init_std = {self.init_std}, expected a number from 0"),
            (self.dtype not in DTYPES, f"dtype = {self.dtype}, expected one of {', '.join(DTYPES)}"),
        ):
            if is_wrong:
                raise ConfigError(f"rows: {text}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of rows and states."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class Push:
    """Gradients of one rank and one step: ids that differ, in ascending order."""

    ids: NDArray[np.int64]
    grads: torch.Tensor
    """(u, dim)."""
    counts: NDArray[np.int64] | None
    """Occurrences, (u,); None: not asked for, because each id is admitted at once."""
    weight: float = 1.0
    """In the sum of gradients."""


class RowShard:
    """See the top of this page."""

    def __init__(self, rules: RowRules) -> None:
        self.rules, self._optimizer = rules, RowOptimizer.parse(rules.optimizer)
        self.rows = self._new_store()
        self.waiting = RowStore(1, 0, torch.float64)
        """Counts of ids that have no row yet."""
        self.version = 0
        """Steps that were applied."""
        self.removed: tuple[NDArray[np.int64], NDArray[np.int64]] = (np.empty(0, np.int64), np.empty(0, np.int64))
        """Ids of rows that expired, and the version at which each was removed."""
        self.removed_from = 0
        """Removals at this version and later ones are all remembered."""
        self._swept_seconds = 0.0
        self._admitted = 0
        """Counts of 0 in `waiting`, about: their ids have rows."""

    def read(self, ids: NDArray[np.int64], now_seconds: float) -> torch.Tensor:
        """Return the values, (u, dim), of `ids`; of one without a row its first values."""
        places = self._live_places(self.rows, ids, now_seconds)
        absent = np.flatnonzero(places < 0)
        if not len(absent):
            return self.rows.values.index_select(0, torch.from_numpy(places))
        if len(absent) == len(ids):
            return self._first_values(ids)
        values = self.rows.values.index_select(0, torch.from_numpy(np.maximum(places, 0)))
        values[torch.from_numpy(absent)] = self._first_values(ids[absent])
        return values

    def apply(self, pushes: list[Push], lr: float, now_seconds: float) -> None:
        """Make one step with the weighted sum of `pushes`, in their order."""
        ids, grads, counts = self._sum(pushes)
        self.version += 1
        self._sweep(now_seconds)
        if not len(ids):
            return
        self._forget_expired(ids, now_seconds)
        places = self.rows.find(ids)
        absent = np.flatnonzero(places < 0)
        if len(absent):
            admitted = absent[self._admit(ids[absent], None if counts is None else counts[absent], now_seconds)]
            new = ids[admitted]
            places[admitted] = self.rows.add(new, self._first_values(new), None)
            self._forget_removals(new)
        has_row = np.flatnonzero(places >= 0)
        places = places[has_row]
        at = torch.from_numpy(places)
        values, states = self.rows.values.index_select(0, at), self.rows.states.index_select(0, at)
        self._optimizer.update(values, states, grads[torch.from_numpy(has_row)], lr)
        self.rows.values.index_copy_(0, at, values)
        self.rows.states.index_copy_(0, at, states)
        self.rows.used[places], self.rows.touched[places] = now_seconds, self.version

    @property
    def waiting_count(self) -> int:
        """Ids that have occurred and have no row."""
        return int((self.waiting.values > 0).sum())

    def expire(self, now_seconds: float) -> None:
        """Free the memory of all that has expired."""
        life = self.rules.expire_seconds
        if life is None:
            return
        self._swept_seconds = now_seconds
        gone = now_seconds - self.rows.used > life
        if gone.any():
            self._remember_removals(self.rows.ids[gone])
            self.rows.keep(~gone)
        gone = now_seconds - self.waiting.used > life
        if gone.any():
            self.waiting.keep(~gone)

    def clear(self) -> None:
        """Drop all rows and counts; copies begin anew."""
        self.rows, self.waiting = self._new_store(), RowStore(1, 0, torch.float64)
        self.removed = (np.empty(0, np.int64), np.empty(0, np.int64))
        self.version += 1
        self.removed_from = self.version

    def put_rows(
        self, ids: NDArray[np.int64], values: torch.Tensor, states: torch.Tensor, used: NDArray[np.float64]
    ) -> None:
        """Add rows that were saved; their `ids` are absent."""
        places = self.rows.add(ids, values, states)
        self.rows.used[places], self.rows.touched[places] = used, self.version

    def put_waiting(self, ids: NDArray[np.int64], counts: NDArray[np.float64], used: NDArray[np.float64]) -> None:
        """Add counts that were saved; their `ids` are absent."""
        places = self.waiting.add(ids, torch.from_numpy(counts)[:, None], None)
        self.waiting.used[places] = used

    def to_values(self) -> dict[str, Any]:
        """Return the numbers of the state that are no tensors, as JSON values."""
        return {"version": self.version, "removed_from": self.removed_from}

    def from_values(self, values: Mapping[str, Any]) -> None:
        """Take what `to_values` returned."""
        self.version, self.removed_from = values["version"], values["removed_from"]

    # -- parts of a step -------------------------------------------------------------------------

    def _new_store(self) -> RowStore:
        rules = self.rules
        return RowStore(rules.dim, self._optimizer.state_width(rules.dim), rules.torch_dtype)

    def _first_values(self, ids: NDArray[np.int64]) -> torch.Tensor:
        rules = self.rules
        return initial_rows(ids, rules.key, rules.dim, rules.init_std, rules.torch_dtype)

    def _sum(self, pushes: list[Push]) -> tuple[NDArray[np.int64], torch.Tensor, NDArray[np.int64] | None]:
        if len(pushes) == 1:
            (only,) = pushes
            return only.ids, only.grads if only.weight == 1 else only.grads * only.weight, only.counts
        ids, inverse = np.unique(np.concatenate([each.ids for each in pushes]), return_inverse=True)
        grads = torch.zeros(len(ids), self.rules.dim, dtype=self.rules.torch_dtype)
        counts = None if any(each.counts is None for each in pushes) else np.zeros(len(ids), np.int64)
        begin = 0
        for each in pushes:
            at = inverse[begin : begin + len(each.ids)]
            begin += len(each.ids)
            grads.index_add_(0, torch.from_numpy(at), each.grads, alpha=each.weight)
            if counts is not None and each.counts is not None:
                counts[at] += each.counts
        return ids, grads, counts

    def _admit(
        self, ids: NDArray[np.int64], counts: NDArray[np.int64] | None, now_seconds: float
    ) -> NDArray[np.bool_]:
        """Count occurrences; return which of `ids` get a row. See [Note: admission]."""
        if counts is None:
            return np.ones(len(ids), np.bool_)
        places = self.waiting.find(ids)
        known = places >= 0
        totals = counts.astype(np.float64)
        totals[known] += self.waiting.values[torch.from_numpy(places[known]), 0].numpy()
        admitted = totals >= self.rules.admit
        later = ~admitted & ~known
        places[later] = self.waiting.add(ids[later], torch.from_numpy(totals[later])[:, None], None)
        still = ~admitted
        self.waiting.values[torch.from_numpy(places[still]), 0] = torch.from_numpy(totals[still])
        self.waiting.used[places[still]] = now_seconds
        self.waiting.values[torch.from_numpy(places[admitted & known]), 0] = 0  # a removed row begins anew
        self._admitted += int((admitted & known).sum())
        if 2 * self._admitted > len(self.waiting) + _LEAST_COMPACTED:
            self._compact_waiting()
        return admitted

    def _compact_waiting(self) -> None:
        self.waiting.keep(self.waiting.values[:, 0].numpy() > 0)
        self._admitted = 0

    # -- expiry ----------------------------------------------------------------------------------

    def _live_places(self, store: RowStore, ids: NDArray[np.int64], now_seconds: float) -> NDArray[np.int64]:
        places = store.find(ids)
        life = self.rules.expire_seconds
        if life is not None and len(store):
            places[(places >= 0) & (now_seconds - store.used[np.maximum(places, 0)] > life)] = -1
        return places

    def _forget_expired(self, ids: NDArray[np.int64], now_seconds: float) -> None:
        """Free all that has expired if some of `ids` has: it begins anew."""
        if self.rules.expire_seconds is None:
            return
        for store in (self.rows, self.waiting):
            if (store.find(ids) != self._live_places(store, ids, now_seconds)).any():
                self.expire(now_seconds)
                return

    def _sweep(self, now_seconds: float) -> None:
        life = self.rules.expire_seconds
        if life is not None and now_seconds - self._swept_seconds > life / _SWEEPS_A_LIFE:
            self.expire(now_seconds)

    def _remember_removals(self, ids: NDArray[np.int64]) -> None:
        old, versions = self.removed
        ids = np.concatenate([old, ids])
        versions = np.concatenate([versions, np.full(len(ids) - len(old), self.version, np.int64)])
        surplus = len(ids) - MOST_REMOVED
        if surplus > 0:
            self.removed_from = int(versions[surplus - 1]) + 1
            ids, versions = ids[surplus:], versions[surplus:]
        self.removed = ids, versions

    def _forget_removals(self, ids: NDArray[np.int64]) -> None:
        """Remove ids that have a row again: a copy gets it."""
        if len(self.removed[0]):
            stays = ~np.isin(self.removed[0], ids)
            self.removed = self.removed[0][stays], self.removed[1][stays]
