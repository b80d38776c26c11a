"""The tables of a plan file: which keys may stand together under a name, beside the flat spellings."""

from __future__ import annotations

from typing import Final

PLAN_TABLES: Final = {
    "": ("version", "predicted"),
    "mesh": (
        "data", "shard", "tensor", "pipeline", "expert", "context", "zero", "shard_within", "tensor_recipe",
        "sequence_parallel", "schedule", "micro_batches", "chunks", "weight_versions", "pipeline_cuts",
        "context_kind",
    ),
    "exchange": (
        "bucket_bytes", "first_bucket_bytes", "codec", "lossy", "codec_for", "weight_codec", "expert_codec",
        "overlap_gather", "route", "ranks_per_switch", "switch_of", "connections", "congestion_control",
    ),
    "memory": ("recompute", "frozen_codec", "offload", "offload_directory", "train_schedule"),
    "precision": ("precision", "bf16_parameters"),
    "sync": (
        "accumulate", "clip_norm", "sync_batch_norm", "buffers", "nonfinite", "timeout_seconds", "stall_seconds",
        "balance", "balance_cap",
    ),
}  # fmt: skip
"""All keys of a plan, by table; "": in none."""
