"""Which parts of the code are mutated, and which tests must notice: few and fast.

`tests/style/test_mutation_areas.py` holds this table against the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Area:
    """A part of the code, and the tests that must hold it."""

    sources: tuple[str, ...]
    """Folders or files, relative to `src/farandole`."""
    tests: tuple[str, ...]
    """Relative to `tests`; few and fast."""

    def files(self, source: Path) -> list[str]:
        """Return its files, relative to `source`."""
        found: set[Path] = set()
        for each in self.sources:
            place = source / "farandole" / each
            found |= set(place.rglob("*.py")) if place.is_dir() else {place}
        return sorted(str(path.relative_to(source)) for path in found)


AREAS = {
    "codecs": Area(
        ("comm/codecs", "comm/messages"),
        (
            "unit/comm/test_codecs.py", "unit/comm/test_messages.py", "unit/comm/test_packing.py",
            "unit/comm/test_eligibility.py", "unit/comm/test_reduce_rules.py", "unit/comm/test_native_loops.py",
            "ranks/test_codec_overflow.py",
        ),
    ),
    "reducer": Area(
        ("comm/reducer", "comm/buckets", "comm/sessions", "comm/gradients"),
        (
            "unit/comm/test_buckets.py", "unit/comm/test_gradients.py", "unit/comm/test_loss_scale.py",
            "unit/comm/test_segments.py", "unit/comm/test_units.py", "unit/comm/test_saved_state.py",
            "unit/comm/test_bucket_set.py", "unit/comm/test_reducer.py", "unit/comm/test_codec_session.py",
            "unit/comm/test_count_calls.py",
            "ranks/test_reducer.py", "ranks/test_reducer_exchanges.py",
            "ranks/test_engine.py", "ranks/test_coded_engine.py",
            "ranks/test_grad_ownership.py", "ranks/test_optimizer_steps.py", "ranks/test_exchange_state.py",
            "ranks/test_codec_overflow.py", "ranks/test_codec_session.py",
            "ranks/test_two_engines.py", "ranks/test_switch_codecs.py", "ranks/test_complex.py",
            "ranks/test_share_of_batch.py", "ranks/test_loss_scale.py", "ranks/test_accelerators.py",
            "ranks/test_generated.py", "ranks/test_auto.py", "ranks/test_default_dtype.py",
            "ranks/test_records.py::test_every_bucket_is_timed_in_order",
            *(
                f"ranks/test_horovod_optimizer.py::test_{name}"
                for name in (
                    "parameters_are_matched_by_name_whatever_their_order", "an_optimizer_outlives_its_world",
                    "a_rank_joins_before_its_first_step_and_with_two_optimizers",
                )
            ),
        ),
    ),
    "transport": Area(
        ("comm/transport",),
        (
            "unit/comm/test_comm_thread.py", "unit/comm/test_connection.py", "unit/comm/test_callers.py",
            "unit/comm/test_transport_pair.py", "unit/comm/test_connect.py", "ranks/test_transport.py",
            "ranks/test_crosswise.py",
        ),
    ),
}  # fmt: skip
