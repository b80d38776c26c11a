"""`fd.freeze`: a module whose weights train no more, stored in few bits as soon as it is made."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch import nn

from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.errors import ConfigError
from .block_codes import FORMS
from .encode_model import encode_weights, frozen_weights

M = TypeVar("M", bound=nn.Module)


def freeze(module: M, codec: Literal["none", "int8", "int4"] = "none") -> M:
    """Freeze `module`, and store its Linear, Embedding and transformers' Conv1D weights in few bits.

    What the plan key `frozen_codec` does to a whole model when it is distributed, for a part of one while the
    model is made: a model whose weights do not fit in memory can be made layer by layer. Exchanges nothing: the
    ranks' weights are made equal by `fd.distribute`.

    Args:
        module: changed in place; its parameters require no gradient from now on.
        codec: "int8" or "int4", in blocks with a scale each; "none" keeps the weights as they are.

    Returns:
        The same module.

    Raises:
        ConfigError: another codec, or a weight that holds NaN or infinity; nothing is changed then.
    """
    if codec not in (NONE, *FORMS):
        raise ConfigError(f"freeze: codec = {codec!r}, expected none, {' or '.join(FORMS)}")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.requires_grad_(False)
    if codec == NONE:
        return module
    found = dict(frozen_weights(module))
    for weight, places in found.items():
        if not bool(torch.isfinite(weight).all()):
            for parameter in trained:
                parameter.requires_grad_(True)
            raise ConfigError(
                f"freeze: {places[0][2]!r} holds NaN or infinity", remedy="load the weights before freezing them"
            )
    encode_weights(found, codec, ())
    return module
