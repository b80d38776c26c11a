"""What `farandole.core.vocabulary.rules` refuses, as the table of docs/reference/plan.md, with examples."""

from __future__ import annotations

import itertools
import re
from typing import Any

from farandole.core.vocabulary.rules import FACTS, RULES, Rule, broken, shown
from farandole.core.vocabulary.spec import Plan
from tests.style.marked import Marked

TABLE = Marked("reference/plan.md", "rules")
_VALUES: dict[str, tuple[Any, ...]] = {
    "accumulate": (2, 0), "balance": ("speed",), "balance_cap": (4, -1), "bf16_parameters": (True,),
    "bucket_bytes": (1024, -1), "chunks": (2,), "clip_norm": (1.0, -1.0), "codec": ("powersgd", "int8", "auto"),
    "codec_for": ({"*": "topk"}, {"*": "int8"}), "congestion_control": ("bbr", "?"), "connections": (2, 17, 0),
    "context": (2, 0), "context_kind": ("ring",), "data": (2, 0), "expert": (2, 0), "expert_codec": ("int8",),
    "first_bucket_bytes": (1024, 0), "frozen_codec": ("int8",), "micro_batches": (2, -1), "nonfinite": ("skip",),
    "offload": ("disk", "none"), "offload_directory": ("/data",), "on_failure": ("continue",),
    "overlap_gather": (True,),
    "pipeline": (2, 4, 0), "pipeline_cuts": (("layers.2",),), "precision": ("fp16",), "recompute": ("blocks", ()),
    "route": ("hierarchical", "flat"), "schedule": ("gpipe", "zb-h1"), "sequence_parallel": (True,),
    "shard": (2, 0), "shard_within": ("host",), "staging": ("always",), "stall_seconds": (-1.0,),
    "sync": ("local", "server", "auto"), "sync_batch_norm": (True,), "tensor": (2, 0),
    "tensor_recipe": ({"*.up": "columns"},), "timeout_seconds": (0.0,), "train_schedule": ({"0": "head.*"},),
    "version": (0,), "weight_codec": ("int8",), "weight_versions": (2, 3), "zero": (1, 3, 4),
    **dict.fromkeys(FACTS, (True,)),
}  # fmt: skip
"""Values of keys and facts that are tried for an example, beside the defaults."""


def example(rule: Rule) -> dict[str, Any]:
    """Return values of its keys that `rule` refuses, and no rule before it."""
    defaults = vars(Plan())
    tried = [[*_VALUES.get(key, ()), *([defaults[key]] if key in defaults else [])] for key in rule.values]
    for values in itertools.product(*tried):
        found = dict(zip(rule.values, values, strict=True))
        if broken(found) is rule:
            return found
    raise AssertionError(f"{', '.join(rule.values)}{rule.why}: refuses nothing, or another rule does so first")


def rows() -> list[str]:
    """Return the table of rules on several keys, in Markdown; those that differ in the last key are one row."""
    lines = ["| not together | because | instead |", "|---|---|---|"]
    several = [rule for rule in RULES if len(rule.values) > 1]
    for (_, facts, why, remedy), alike in itertools.groupby(several, _without_last_key):
        examples = [[_shown(*each) for each in example(rule).items() if each[0] not in FACTS] for rule in alike]
        words = [*examples[0][:-1], " or ".join(each[-1] for each in examples), *(FACTS[fact] for fact in facts)]
        lines.append(f"| {', '.join(words)} | {re.sub('^[:,] ', '', why).strip()} | {remedy} |")
    return lines


def _without_last_key(rule: Rule) -> tuple[list[str], list[str], str, str]:
    facts = [key for key in rule.values if key in FACTS]
    return [key for key in rule.values if key not in FACTS][:-1], facts, rule.why, rule.remedy


def _shown(key: str, value: Any) -> str:
    return f"`{key} = {shown(value)}`"
