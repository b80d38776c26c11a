"""The package `horovod` of ranks started by ``farandole run --as-horovod``.

Everything below it is `farandole.horovod`: see `farandole.horovod.as_horovod`.
"""

from farandole.horovod.as_horovod import API_VERSION, become_horovod
from farandole.version import VERSION as __farandole_version__

become_horovod()

from farandole.horovod.runner import run  # noqa: E402 - nothing of ours runs beside another Horovod

__version__ = API_VERSION

__all__ = ["__farandole_version__", "__version__", "run"]
