"""The reducers of a job, whose exchange is switched on all ranks between the same two steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...comm.engine.reducer import GradientReducer
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.env import read_elastic_settings
from ...core.step_model.bucket_plan import ExchangeKeys
from ...core.vocabulary.codec_spec import AUTO
from ...core.vocabulary.errors import CommError, ConfigError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.sync_spec import EVERY_STEP
from ...parallel.data.tuned_micro_batches import TunedMicroBatches
from ...parallel.model import DistributedModel
from ...parallel.optim.one_bit_adam import OneBitAdam


def why_not(here: World) -> str:
    """Return why nothing of the exchange can be tuned in this job; empty where it can. The same on all ranks."""
    if here.size == 1:
        return "one rank exchanges no gradients"
    if read_elastic_settings() is not None:
        return "ranks of an elastic job come and go, and what was measured with others says little"
    if any(isinstance(each, OneBitAdam) for each in here.session.steps.optimizers()):
        return "OneBitAdam chooses the codec of its momentum itself"
    models = DistributedModel.all_of(here)
    if not models:
        return "no model was given to farandole.distribute"
    return next((reason for model in models if (reason := _why_not_this(model))), "")


def _why_not_this(model: nn.Module) -> str:
    distributed, name = DistributedModel.of(model), type(model).__name__
    plan, mesh = distributed.plan_and_mesh
    if not mesh.degrees.is_data_alone:
        return f"{name} is divided over ranks ({mesh.degrees}): only plain data parallelism is tuned"
    if plan.zero:
        return f"{name} has zero = {plan.zero}, whose shards lie as the buckets do: only zero = 0 is tuned"
    if plan.sync != EVERY_STEP:
        return f'{name} has sync = "{plan.sync}": only exchanges of each step are tuned'
    if plan.codec == AUTO:
        return 'codec = "auto" chooses codec, buckets, route and connections itself: use one of the two'
    return "" if distributed.reducer is not None else f"{name} exchanges no gradients"


class ExchangeSwitch:
    """Switches all reducers of a job. All ranks make it after the same step, and call it with the same."""

    def __init__(self, here: World) -> None:
        self._here = here
        self.models = DistributedModel.all_of(here)
        found = [DistributedModel.of(model).reducer for model in self.models]
        self.reducers: list[GradientReducer] = [each for each in found if each is not None]
        self.logs = [reducer.keep_timings() for reducer in self.reducers]
        plan = DistributedModel.of(self.models[0]).plan
        assert plan is not None, "it is distributed"
        self.plan: Plan = plan
        """The plan of the job."""
        self.keys = ExchangeKeys.of_plan(plan, self.main.parts.open_route.require().route)
        """In force."""
        self.start = self.keys
        self.micro_batches = here.session.kept(TunedMicroBatches)
        """What divides batches; None: it is not asked to."""

    @property
    def problem(self) -> str:
        """Why this rank's batches are to be divided as the plan says; empty: nothing is known against it."""
        if self.micro_batches is None:
            return "--settings leaves it out"
        if len(self.models) > 1:
            return "several models are trained"
        if not self.micro_batches.steps:
            return "the loop does not call farandole.step"
        return self.micro_batches.problem

    @property
    def main(self) -> GradientReducer:
        """The reducer that has most to exchange: the step model looks at this one."""
        return max(self.reducers, key=lambda reducer: sum(reducer.bucket_bytes))

    @property
    def is_changed(self) -> bool:
        """Whether models were distributed, or dropped, since this was made."""
        now = DistributedModel.all_of(self._here)
        return len(now) != len(self.models) or any(a is not b for a, b in zip(now, self.models, strict=True))

    @property
    def wait_seconds(self) -> float:
        """How long this rank waits for the exchange at the end of backward: the median step, all models."""
        return sum(log.wait_seconds for log in self.logs)

    def to(self, keys: ExchangeKeys) -> str:
        """Exchange by `keys` from now on, on all ranks; return why some rank cannot, where all are as before."""
        if keys == self.keys:
            return ""
        problems = self._try(keys)
        if not problems:
            self.keys = keys
            return ""
        worse = self._try(self.keys)
        if worse:
            raise CommError(
                f"switching to {keys.to_text()} failed ({problems[0]}), and so did the way back ({worse[0]})",
                rank=self._here.rank,
                operation="tuning",
                remedy="leave this setting out of farandole tune --settings",
            )
        return problems[0]

    def _try(self, keys: ExchangeKeys) -> Sequence[str]:
        problem = ""
        if self.micro_batches is not None:
            self.micro_batches.switch(keys.micro_batches)
        try:
            for reducer in self.reducers:
                if reducer.is_open:
                    reducer.switch_keys(keys)
        except ConfigError as error:
            problem = error.message
        except CommError as error:
            if type(error) is not CommError:
                raise  # a rank is lost, or the ranks disagree
            problem = error.message
        return [each for each in all_gather_json(self._here, "tuning/switched", problem) if each]
