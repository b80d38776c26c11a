"""A training by `fit` under ``farandole verify``: its batches, losses and model, and one step made again.

The step that is made again is the first that can be; with ``--deep`` each that can be. See [Note: the replay] in
`one_process`. A difference there is not the exchange's, which is checked by itself: so it is *not exact*, with
what in the model or the data is known to cause it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....comm.world.store_sync import all_gather_json
from ....train.verify.gradient_reference import compare_gradients
from ....train.verify.verify import Check, check_equal
from ...exchange.names import label_of
from ...verify.arrays import Array, as_torch
from ...verify.exchanges import SeenExchange, not_checked, tensors, tolerance
from ...verify.verification import ArrayVerification, check_weights, labelled
from ..variables import optimizer_variables
from .backends import (
    added_passes,
    computes_in_16_bits,
    draws_unseen,
    is_distributed,
    normalizing_layers,
    shared_weights,
    to_numpy,
)
from .one_process import Snapshot, join, replay, shape_of_batch, too_large
from .seeds import OwnSeeds

_NAME = "gradients of one process"
_ALIKE = "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in fit; change optimizers on all ranks alike"
_SYNC = "hvd.SyncBatchNormalization, GroupNormalization, or larger batches"
_LATER = (
    "the model had no variables before its first batch",
    "ranks began with other weights",
    "gradients were not finite, as while a loss scale is found",
)
"""Reasons that may be gone in the next step."""


class FitVerification:
    """A `fits.FitObserver`, and a `verification.Fit`."""

    wants_batch = True

    def __init__(self, verification: ArrayVerification) -> None:
        self._verification = verification
        self._here = verification.here
        self._seeds = OwnSeeds(self._here.rank)
        verification.fit = self
        self._model: Any = None
        self._before: Snapshot | None = None
        self._nest: Any = None
        self._arrays: list[Array] = []
        self._reason = "no step was made"
        self._is_over = self._here.size == 1
        self._compared: list[str] = []
        self._worst: tuple[float, str] = (0.0, "")
        self._differs = ""

    # -- a `FitObserver` -------------------------------------------------------------------------

    def begins(self, model: Any, calls: int) -> None:
        """Keep the variables, if the step is to be made again."""
        self._model, self._arrays = model, []
        if calls < 2 and is_distributed(model):
            self._seeds.give(model)
        self._before = None if self._is_over else Snapshot.take(model)

    def batch(self, model: Any, nest: Any, arrays: Sequence[Array]) -> None:
        """Keep it."""
        self._nest, self._arrays = nest, list(arrays)
        weighs = isinstance(nest, tuple) and len(nest) > 2 and nest[2] is not None
        self._verification.batch(arrays, weighs=weighs)

    def ends(self, model: Any, steps: int, logs: Any) -> None:
        """Compare; after the last step that is wanted, end the script."""
        seen = list(self._verification.seen)
        self._verification.step_ends(_loss(logs))
        if not self._is_over:
            self._make_again(model, seen)
        passes, _ = added_passes(model)
        if self._verification.steps >= self._verification.run.steps * passes:
            self._verification.run.finish()

    # -- the step made again ---------------------------------------------------------------------

    def _make_again(self, model: Any, seen: list[SeenExchange]) -> None:
        here = self._here
        layout, rows = shape_of_batch(self._arrays)
        digest = "" if self._before is None else self._before.weights_digest()
        told = all_gather_json(here, "verify/step", [self._problem(seen), digest, layout, rows])
        problem = next((why for why, *_ in told if why), "")
        if not problem and len({digest for _, digest, *_ in told}) > 1:
            problem = _LATER[1]
        if not problem and len({layout for _, _, layout, _ in told}) > 1:
            problem = "batches of ranks differ in more than the number of samples"
        rows_of_ranks = [rows for *_, rows in told]
        if problem:
            self._reason = problem
            self._is_over = problem not in _LATER
            return
        result = self._compare(model, seen, join(self._arrays))
        error, name, failed = all_gather_json(here, "verify/one process", result)[0]
        if failed:
            self._reason = failed
        else:
            step = self._verification.steps
            self._compared.append(f"{sum(rows_of_ranks)} samples of step {step}")
            self._worst = max(self._worst, (error, name))
            if not error <= self._most(seen) and not self._differs:
                self._differs = f"{name!r} of step {step} differs by {error:.2g} from that of the joined batch"
                wrong = self._verification.has_wrong_exchange
                self._differs += ": see gradients" if wrong else _causes(model, rows_of_ranks)
        self._is_over = not self._verification.run.is_deep

    def _problem(self, seen: list[SeenExchange]) -> str:
        if self._before is None:
            return _LATER[0]
        passes, argument = added_passes(self._model)
        if passes > 1:
            return f"{argument} adds up several batches"
        if not seen:
            return "no gradients were exchanged"
        if seen[0].not_comparable:
            return seen[0].not_comparable
        if not all(np.isfinite(each).all() for exchange in seen for each in exchange.results):
            return _LATER[2]
        if not self._arrays:
            return "the batch was not seen (ragged or sparse tensors?)"
        if too_large(self._arrays, self._here.size):
            return "the joined batch is too large"
        if self._before.drew_random_numbers() or draws_unseen(self._model):
            return "layers draw random numbers (dropout?), which one process would draw otherwise"
        return ""

    def _compare(self, model: Any, seen: list[SeenExchange], joined: list[Array]) -> list[Any]:
        """Return how far the exchanged gradients are from those of one process, of which, and why not known."""
        assert self._before is not None, "there was no problem"
        try:
            alone = replay(self._verification, model, self._before, self._nest, joined)
        except Exception as failure:
            return [0.0, "", f"the model does not take the joined batch ({type(failure).__name__}: {failure})"]
        if [list(each.labels) for each in alone] != [list(each.labels) for each in seen]:
            return [0.0, "", "one process would compute other gradients"]
        worst = (0.0, "")
        for mine, theirs in zip(seen, alone, strict=True):
            factor = self._here.size if mine.is_sum else 1
            actual = {name: each / factor for name, each in tensors(mine.labels, mine.results).items()}
            reference = tensors(theirs.labels, theirs.results)
            for each in compare_gradients(actual, reference, {}, self._here.size):
                worst = max(worst, (each.error, each.name))
        return [*worst, ""]

    def _most(self, seen: list[SeenExchange]) -> float:
        return max(tolerance(each.results, is_mixed=computes_in_16_bits(self._model)) for each in seen)

    # -- a `verification.Fit` --------------------------------------------------------------------

    def checks(self) -> list[Check]:
        """Return the answers about model and optimizer."""
        here, model = self._here, self._model
        checks = [check_weights(here, _values(shared_weights(model)))]
        if getattr(model, "optimizer", None) is not None:
            state = {name: as_torch(each) for name, each in _values(optimizer_variables(model.optimizer)).items()}
            checks.append(check_equal(here, "optimizer state", state, _ALIKE))
        if here.size > 1:
            checks += [*_check_batch_norm(model), self._one_process()]
        return checks

    def _one_process(self) -> Check:
        if self._differs:
            return Check(_NAME, None, self._differs, _REMEDY, "not exact")
        if self._compared:
            error, name = self._worst
            answer = f"those of the joined batch: {', '.join(self._compared)} (the farthest, {name}: {error:.1g})"
            return Check(_NAME, True, answer)
        return not_checked(_NAME, self._reason)


_REMEDY = "fine if it is meant; else samples must count alike, and layers and losses take each by itself"


def _causes(model: Any, rows: Sequence[int]) -> str:
    found = [f"{layer.name} normalises per rank" for layer in normalizing_layers(model)[:1]]
    if len(set(rows)) > 1:
        found.append(f"ranks were given {', '.join(map(str, rows))} samples")
    return f": {'; '.join(found)}" if found else ": a mask or weights in the loss, or samples that are compared?"


def _check_batch_norm(model: Any) -> list[Check]:
    layers = normalizing_layers(model)
    if not layers:
        return []
    shown = ", ".join(layer.name for layer in layers[:3]) + (", ..." if len(layers) > 3 else "")
    answer = (
        f"{len(layers)} BatchNormalization layer{'s normalise' if len(layers) > 1 else ' normalises'} per rank"
    )
    return [Check("batch norm", None, f"{answer} ({shown})", _SYNC, "not exact")]


def _values(variables: Sequence[Any]) -> dict[str, Array]:
    values = [to_numpy(each) for each in variables]
    known = [(label_of(variable), value) for variable, value in zip(variables, values, strict=True)
             if value is not None]  # fmt: skip
    return labelled([label for label, _ in known], [value for _, value in known])


def _loss(logs: Any) -> float | None:
    value = logs.get("loss") if isinstance(logs, dict) else None
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
