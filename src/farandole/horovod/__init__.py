"""The names of Horovod on Farandole's engine: change one import, keep the script.

::

    import farandole.horovod.torch as hvd

Importing this package imports no torch; the front ends are its submodules. `__version__` is the version of
Horovod whose names and meanings these are, with ours behind the plus sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..version import VERSION

if TYPE_CHECKING:
    from .runner import run

__version__ = f"0.28.1+farandole.{VERSION}"

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module 'farandole.horovod' has no attribute {name!r}")
    from .runner import run

    return run
