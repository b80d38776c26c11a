"""What a batch size costs in steps and in samples, by the critical batch size.

[Note: the critical batch] Steps and samples until a loss is reached, relative to the fewest of each:

    steps(B)   = 1 + B_noise / B         many small steps, each with a noisy gradient
    samples(B) = 1 + B / B_noise         few large steps, which average what was known already

At B = B_noise both are twice the minimum. Source: McCandlish, Kaplan, Amodei et al., "An Empirical Model of
Large-Batch Training", 2018, equation 2.11, with B_noise the simple noise scale tr(Sigma) / |G|^2 of equation 2.9.
It holds for a learning rate that is tuned to each batch size, and B_noise grows while the loss falls.
"""

from __future__ import annotations

import math

from ...core.vocabulary.errors import ConfigError


def relative_steps(batch: float, critical_batch: float) -> float:
    """Return the steps to a loss over the fewest there can be: 1 + B_noise / B. Both in samples, above 0.

    >>> relative_steps(1000, 1000)
    2.0
    """
    return 1.0 + critical_batch / batch


def relative_samples(batch: float, critical_batch: float) -> float:
    """Return the samples to a loss over the fewest there can be: 1 + B / B_noise. Both in samples, above 0.

    >>> relative_samples(3000, 1000)
    4.0
    """
    return 1.0 + batch / critical_batch


def require_critical_batch(value: float | None) -> float | None:
    """Return `value`; raise `ConfigError` if it is no number of samples above 0. None: it was not measured."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"critical batch {value:g}: expected a number of samples above 0",
            remedy="measure it with fd.noise_scale over more steps, or leave it out",
        )
    return value
