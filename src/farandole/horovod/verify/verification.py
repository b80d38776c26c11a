"""One training with TensorFlow or Keras under ``farandole verify``: what was seen of it, and the answers.

Exchanges of gradients tell it what each rank had and what all got. The loop of `fit` tells it the rest: batches,
losses, the model, and when a step ends. In a loop of the script's own only the exchanges are known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...train.verify.verification_run import VerificationRun
from ...train.verify.verify import Check, check_batches, check_equal, check_loss, check_sizes
from .arrays import Array, as_torch, digest_of, unique_labels
from .exchanges import ExchangeCheck, SeenExchange, not_checked

_SHARD = "dataset = farandole.keras.shard(dataset)"
_BROADCAST = (
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in fit, or hvd.broadcast_variables before the first step; "
    "change weights on all ranks alike"
)
_OWN_LOOP = "the loop is not model.fit"
NOT_IN_LOOPS_ON_JAX = (
    "on jax a loop of the script's own keeps weights where verify does not see them: it checks model.fit there"
)

_OF_FIT = ("gradients of one process", "batches", "loss")

Variables = Callable[[], dict[str, Array]]


class Fit(Protocol):
    """What is known of a training by `fit`."""

    def checks(self) -> list[Check]:
        """Return the answers about model and optimizer. To be called by all ranks."""


class ArrayVerification:
    """A `FrontEnd` of `VerificationRun`, kept by the session of a world."""

    def __init__(self, here: World, run: VerificationRun) -> None:
        self.here, self.run = here, run
        self.steps = 0
        """That are done; in a loop of the script's own, exchanges of the first optimizer that were begun."""
        self.seen: list[SeenExchange] = []
        """Exchanges since the last step."""
        self.replayed: list[SeenExchange] | None = None
        """Those of a replay of one process, while there is one: nothing travels then."""
        self.fit: Fit | None = None
        self._check = ExchangeCheck(here)
        self._leader = ""
        self.not_checked = ""
        """Why nothing can be said of this training; empty: something can."""
        self._variables: dict[tuple[str, int], Variables] = {}
        self._batches: list[str] = []
        self._samples: list[int] = []
        self._weighs = False
        self._losses: list[float] = []
        run.watch_also(self)

    # -- what is told ----------------------------------------------------------------------------

    def begins(self, name: str, first: object, variables: Variables, *, is_eager: bool, ranks: int) -> None:
        """Gradients are about to be exchanged, outside graphs; or the exchange is put into a graph.

        In a loop of the script's own, outside graphs, the script ends here after the wanted number of steps.

        Args:
            name: of the optimizer or tape.
            first: the first of its variables.
            variables: returns those whose gradients they are, by label.
            is_eager: outside graphs.
            ranks: how many take part.
        """
        if ranks < self.here.size:
            self.not_checked = (
                f"gradients are exchanged within a process set of {ranks} ranks: verify compares all"
            )
        self._leader = self._leader or name
        self._variables.setdefault((name, id(first)), variables)
        if is_eager and name == self._leader and self.fit is None and self.replayed is None:
            if self.steps >= self.run.steps and threading.current_thread() is threading.main_thread():
                self.run.finish()
            self.steps += 1

    def exchanged(self, seen: SeenExchange) -> None:
        """Gradients were exchanged. May be called by a thread of TensorFlow's."""
        if self.replayed is not None:
            self.replayed.append(seen)
        else:
            self.seen.append(seen)

    def batch(self, arrays: Sequence[Array], *, weighs: bool) -> None:
        """This rank trains on these arrays. `weighs`: whether there are sample weights among them."""
        self._batches.append(digest_of(arrays))
        self._samples.append(next((each.shape[0] for each in arrays if each.ndim), 0))
        self._weighs |= weighs

    def step_ends(self, loss: float | None) -> None:
        """A step of `fit` is done."""
        self.steps += 1
        if loss is not None:
            self._losses.append(loss)
        self._compare()

    @property
    def has_wrong_exchange(self) -> bool:
        """Whether this rank has got something else than the mean."""
        return self._check.has_failed

    def _compare(self) -> None:
        seen, self.seen = self.seen, []
        if self.here.size > 1 and not self.not_checked:
            for number, each in enumerate(seen):
                self._check.compare(each, self.steps if self.fit is not None else number + 1)

    # -- the answers -----------------------------------------------------------------------------

    def checks(self) -> list[Check]:
        """Return the answers."""
        here = self.here
        told = all_gather_json(here, "verify/loops", [self.fit is not None, self.not_checked])
        reasons = [why for _, why in told if why]
        if reasons:
            return [not_checked("training", reasons[0])]
        if len({kind for kind, _ in told}) > 1:
            return [Check("training", False, "some ranks train by model.fit, others do not", "train alike")]
        if self.fit is None:
            most = all_gather_json(here, "verify/exchange counts", len(self.seen))
            self.seen = self.seen[: min(self.run.steps, *most)]
            self._compare()
            checks = [self._weights(), *[not_checked(name, _OWN_LOOP) for name in _OF_FIT]]
        else:
            checks = self.fit.checks()
            numbers = range(1, len(self._batches) + 1)
            if not self._weighs:
                checks += check_sizes(here, self._samples, numbers, _SHARD)
            checks.append(check_batches(here, self._batches, numbers, _SHARD))
            checks.append(check_loss(here, self._losses))
        return checks + (self._check.checks() if here.size > 1 else [])

    def _weights(self) -> Check:
        found: dict[str, Array] = {}
        for read in self._variables.values():
            found |= read()
        return check_weights(self.here, found)


def check_weights(here: World, arrays: dict[str, Array]) -> Check:
    """Return whether weights have the same bits on all ranks."""
    return check_equal(here, "weights", {label: as_torch(each) for label, each in arrays.items()}, _BROADCAST)


def labelled(labels: Sequence[str], arrays: Sequence[Array]) -> dict[str, Array]:
    """Return arrays by unique labels."""
    return dict(zip(unique_labels(labels), arrays, strict=True))


def find_verification(here: World) -> ArrayVerification | None:
    """Return that of a world, made at the first call; None where ``farandole verify`` did not start the job."""
    run = here.session.kept(VerificationRun)
    if run is None:
        return None
    return here.session.keep(ArrayVerification, lambda: ArrayVerification(here, run))
