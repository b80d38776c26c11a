"""What a plan asks of loaders: in which shares the data ranks train. `fd.shard` does it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...comm.world.world import World
from ...core.vocabulary.degrees import EQUAL, SPEED, is_unequal, refuse_shares, shares_of
from ...core.vocabulary.errors import PlanError
from ..model import DistributeCall, Strategy


@dataclass(frozen=True)
class BalanceKeys:
    """The plan's keys. Kept by the session of a world whose shares are not equal."""

    balance: str
    cap: int
    since_step: int = field(default=0, compare=False)
    """How many steps were done when the plan was applied."""

    @property
    def shares(self) -> tuple[float, ...]:
        """By data rank; empty: measured."""
        return shares_of(self.balance)


class _Asked(list[BalanceKeys]):
    """What the plans of one world ask."""


class SharesOfBatch(Strategy):
    """The plan's `balance`: lets the loaders of a world know what its models ask."""

    def __init__(self, call: DistributeCall) -> None:
        super().__init__(call)
        here = self.mesh.here
        self._keys = BalanceKeys(self.plan.balance or EQUAL, self.plan.balance_cap, here.session.steps.done)
        self._asked = here.session.keep(_Asked, _Asked)

    def is_asked(self) -> bool:
        """Always: all models of a world ask the same."""
        return True

    def check(self) -> None:
        """Raise `PlanError` for shares of another number of ranks, and for a second model with another balance."""
        keys, asked, here = self._keys, self._asked, self.mesh.here
        if any(each != keys for each in asked):
            raise PlanError(
                f'plan: balance = "{keys.balance}" (balance_cap = {keys.cap}), and another model of this job has '
                f'"{asked[0].balance}" ({asked[0].cap}), but a loader does not know which model it is for',
                remedy="give all models the same balance and balance_cap",
            )
        refuse_shares(keys.balance, here.sample_size)
        if keys.balance == SPEED and here.device.type != "cpu" and here.size > 1:
            raise PlanError(
                f'plan: balance = "speed" on device {here.device.type}: the host does not see how long an '
                "accelerator computes",
                remedy='give the shares, such as balance = "2,1", or leave balance out',
            )

    def apply(self) -> None:
        """Let the loaders know."""
        self._asked.append(self._keys)


def is_balance_known(here: World) -> bool:
    """Return whether a model of `here` was distributed: all others ask the same of loaders."""
    return bool(here.session.kept(_Asked))


def balance_of(here: World) -> BalanceKeys | None:
    """Return what the loaders of `here` are to do; None: share equally, or nothing was distributed yet."""
    asked = here.session.kept(_Asked)
    return asked[0] if asked and is_unequal(asked[0].balance) and here.sample_size > 1 else None
