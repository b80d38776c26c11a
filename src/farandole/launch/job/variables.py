"""Which variables of the launcher's environment ranks elsewhere get (ssh, Ray): a list, and what ``-x`` names.

The rest of their environment is their host's own: PATH and HOME for example are the host's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...core.environ.env import (
    CORES,
    ELASTIC,
    ELASTIC_KEY,
    ELASTIC_WORKER,
    HOSTS_FILE,
    NONCE,
    PLAN_FILE,
    RUN_DIRECTORY,
    SECRET,
    TYPED,
)
from ...core.launchers.rank_variables import RANK_NAMES
from ...core.vocabulary.errors import ConfigError

FORWARDED = (
    "PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "LANG", "TZ", "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
FORWARDED_PREFIXES = (
    "FARANDOLE_", "HOROVOD_", "OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_",
    "CUDA_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "LC_", "KERAS_", "TF_", "JAX_", "XLA_",
)  # fmt: skip
_NOT_TENSORFLOW = (
    "TF_CLI_", "TF_HTTP_", "TF_TOKEN_", "TF_VAR_",
)  # fmt: skip
"""Terraform's: some of them are passwords and tokens. Its other variables that begin with TF_ hold none."""
_OF_A_HOST = RANK_NAMES | {
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",  # names differ from host to host: chosen for each
    "TF_CONFIG",  # of tf.distribute: says which of its hosts this one is
    RUN_DIRECTORY, PLAN_FILE, HOSTS_FILE, NONCE, SECRET, ELASTIC, ELASTIC_KEY, ELASTIC_WORKER, CORES, TYPED,
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def forwarded_variables(environment: Mapping[str, str], asked: Sequence[str] = ()) -> dict[str, str]:
    """Return what is sent to every host: the list's, then ``NAME`` or ``NAME=VALUE`` as asked.

    Raises `ConfigError` for a name that is none, and for one that is not set here.
    """
    chosen = {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_HOST
        and (name in FORWARDED or name.startswith(FORWARDED_PREFIXES))
        and not name.startswith(_NOT_TENSORFLOW)
    }
    for text in asked:
        name, equals, value = text.partition("=")
        if not _NAME.fullmatch(name) or "\0" in value:
            # Not the value: it may be secret.
            raise ConfigError(f"-x {name!r}: expected NAME or NAME=VALUE")
        if name in RANK_NAMES:
            raise ConfigError(f"-x {name}: every rank is told its own", remedy="leave it out")
        if not equals:
            if name not in environment:
                raise ConfigError(f"-x {name}: it is not set here", remedy=f"-x {name}=VALUE")
            value = environment[name]
        chosen[name] = value
    return chosen
