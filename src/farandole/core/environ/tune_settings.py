"""What ``farandole tune`` tells the ranks: one variable, read by `train.session`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..vocabulary.errors import ConfigError
from ..vocabulary.suggestions import did_you_mean
from .env import TUNE, variables

SETTINGS = (
    "bucket_bytes",
    "first_bucket_bytes",
    "codec",
    "route",
    "connections",
    "micro_batches",
    "loader_workers",
)
"""What may be tuned: keys of the plan, and the workers of the data loader."""


@dataclass(frozen=True)
class TuneSettings:
    """How a running job is tuned. Raises `ConfigError` for values that make no sense."""

    names: tuple[str, ...] = SETTINGS
    """Those of `SETTINGS` that may change."""
    allow_lossy: bool = False
    """Whether codecs that lose precision may be tried."""
    budget: float = 0.02
    """Share of the run's steps that may run by settings that are being tried."""
    trials: int = 10
    steps: int | None = None
    """Steps of the whole run; None: what `fd.log` says, or not known."""
    cache: bool = True
    """Whether what won is kept for the next run in the cache directory, and read from there."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in SETTINGS]
        if unknown or not self.names:
            word = unknown[0] if unknown else ""
            raise ConfigError(
                f"--settings {word!r}: expected some of {','.join(SETTINGS)}",
                remedy=did_you_mean(word, SETTINGS),
            )
        if "codec" in self.names and not self.allow_lossy:
            object.__setattr__(self, "names", tuple(name for name in self.names if name != "codec"))
        if not (0 < self.budget <= 1 and math.isfinite(self.budget)):
            raise ConfigError(f"--budget {self.budget}: expected a share of the steps above 0, at most 1")
        if self.trials < 1:
            raise ConfigError(f"--trials {self.trials}: expected at least 1")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: expected at least 1")

    def to_text(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))


def read_tune_settings(environ: Mapping[str, str] | None = None) -> TuneSettings | None:
    """Return how this job is to be tuned; None: it is not. Raises `ConfigError` for other values."""
    text = variables(environ).get(TUNE, "")
    if not text:
        return None
    try:
        values = json.loads(text)
        return TuneSettings(**{**values, "names": tuple(values.get("names", SETTINGS))})
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"{TUNE} holds no settings", remedy="it is set by farandole tune; do not change it inside the job"
        ) from None
