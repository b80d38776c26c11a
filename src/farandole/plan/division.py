"""Why a model cannot be divided by a degree: heads, experts, tokens and layers. Reasons are texts; "": it can be.

The one home of these rules for the planner and for ``farandole estimate``. What the product refuses whatever the
model is in `core.vocabulary.rules`.
"""

from __future__ import annotations

from collections.abc import Callable

from .profile import ModelProfile


def of_tensor(profile: ModelProfile, degree: int) -> str:
    """Heads and columns."""
    if degree == 1:
        return ""
    facts = [(unit.name, unit.tensor) for unit in profile.units if unit.tensor is not None]
    if not facts:
        return "no layer is recognised that tensor parallel could divide"
    for name, each in facts:
        if each.divides % degree:
            return f"tensor = {degree} does not divide {each.divides} heads or columns of {name}"
    return ""


def of_experts(profile: ModelProfile, degree: int) -> str:
    """Experts of each layer."""
    if degree == 1:
        return ""
    counts = [(unit.name, unit.expert.experts) for unit in profile.units if unit.expert is not None]
    if not counts:
        return "the model has no mixture of experts"
    wrong = [f"{count} experts of {name}" for name, count in counts if count % degree]
    return f"expert = {degree} does not divide {wrong[0]}" if wrong else ""


def of_sequences(profile: ModelProfile, degree: int, tensor: int, kind: str) -> str:
    """Tokens, and heads where attention needs them whole. `kind`: the plan's `context_kind`."""
    if degree == 1:
        return ""
    facts = [unit.attention for unit in profile.units if unit.attention is not None]
    if not facts:
        return "no attention was seen that can be divided: scaled_dot_product_attention, nn.MultiheadAttention"
    wrong = [each.sequence for each in facts if each.sequence % (2 * degree)]
    if wrong:
        return f"sequences of {wrong[0]} tokens do not divide into 2 x {degree} runs"
    for each in facts:
        heads = [count // tensor for count in (each.heads, each.key_value_heads or each.heads)]
        divide = all(count % degree == 0 for count in heads)
        if kind == "heads" and not divide:
            return f'context_kind = "heads" does not divide {min(heads)} heads of a rank by {degree}'
        if each.has_dropout and (kind == "ring" or not divide):
            return f"attention has dropout, and {min(heads)} heads of a rank in a ring of {degree} have none"
    return ""


def may_divide_tokens(profile: ModelProfile) -> bool:
    """Return whether tokens may be divided outside of divided layers: see `TensorFacts.tokens`."""
    found = [unit.tensor.tokens for unit in profile.units if unit.tensor and unit.is_block]
    return bool(found) and all(found)


def of_tokens(profile: ModelProfile, tensor: int, context: int) -> str:
    """Tokens outside of divided layers, where `sequence_parallel` divides them."""
    for unit in profile.units:
        if unit.tensor and unit.is_block and tensor > 1 and unit.tensor.tokens % (tensor * context):
            return (
                f"sequence_parallel: tensor x context = {tensor * context} does not divide {unit.tensor.tokens} "
                f"tokens of {unit.name}: pad them to a multiple"
            )
    return ""


def of_stages(profile: ModelProfile, degree: int) -> str:
    """Layers of a pipeline."""
    if degree > 1 and profile.can_be_cut:
        return f"a pipeline cannot cut this model: {profile.can_be_cut}"
    layers = layers_of(profile)
    return f"{layers} layers do not make {degree} stages" if degree > layers else ""


def of_shards(profile: ModelProfile, zero: int, pipeline: int) -> str:
    """What a stage of ZeRO asks of the model and its optimizer."""
    if zero and pipeline > 1 and profile.tied:
        return f"ZeRO in a pipeline cannot shard what two stages may share: {profile.tied[0]}"
    if zero and not profile.elementwise_optimizer:
        return f"{profile.optimizer} does not work element by element, as ZeRO needs"
    return ""


def layers_of(profile: ModelProfile) -> int:
    """Return the number of layers that stages of a pipeline are made of."""
    return sum(unit.count for unit in profile.units)


def nearest_degree(why_not: Callable[[int], str], degree: int, most: int) -> int:
    """Return the degree up to `most` that can be and is nearest to `degree`; of two the smaller. 1 always can.

    >>> nearest_degree(lambda degree: "" if 12 % degree == 0 else "no", 5, 1024)
    4
    """
    return min((each for each in range(1, most + 1) if not why_not(each)), key=lambda each: abs(each - degree))
