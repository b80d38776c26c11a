"""Starting jobs by Horovod's names: `run` for a function, ``python -m farandole.horovod.runner`` for a command."""

from .function import run

__all__ = ["run"]
