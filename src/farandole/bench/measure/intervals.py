"""Medians and their intervals: those of `core`, under the name that benchmarks use."""

from ...core.step_model.intervals import Interval, median_interval, nested_interval, nested_ratio, paired_ratio

__all__ = ["Interval", "median_interval", "nested_interval", "nested_ratio", "paired_ratio"]
