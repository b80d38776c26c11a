"""The step model: how long a training step takes. Pure arithmetic, standard library only.

`predict_step` (`prediction`) takes a `StepProfile` (when gradients are ready, what codecs cost), a `LinkModel`
(`link`) and a `BucketPlan` (`bucket_plan`) and returns a `StepPrediction`. The autotuner asks it before it
switches codecs; `diagnose` replays recorded buckets by the same recurrence. No other file simulates a
step. `link` has the formulas of one exchange.
"""
