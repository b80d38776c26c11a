"""What every Python of a job started with ``farandole run --backend farandole`` runs first.

Its folder stands first on the PYTHONPATH of the ranks and nowhere else. When a program imports
`torch.distributed`, `farandole.backend.replace_gloo` follows; a program that does not is left as it is, and
imports nothing of this package. A `sitecustomize` of the user's own, which this one hides, runs as without it.

[Note: a Python without farandole] A rank whose Python has torch and no farandole would use gloo, and wait for
ranks that do not. So the import of torch fails there.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

TYPE_CHECKING = False  # `typing` is not imported: every Python of the job would pay for it
if TYPE_CHECKING:
    from typing import Any

_HERE = Path(__file__).resolve().parent


class _AfterTorchDistributed:
    """A finder of `torch.distributed` alone; the module is the usual one, with a call at the end of its import."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return torch's own spec, whose loader has the call."""
        if fullname != "torch.distributed":
            return None
        spec: Any = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: object) -> None:
            execute(module)
            _replace_gloo()

        spec.loader.exec_module = execute_and_replace
        return spec


def _replace_gloo() -> None:
    """See [Note: a Python without farandole]."""
    try:
        from farandole.backend import replace_gloo
        from farandole.core.environ.env import read_backend
    except ModuleNotFoundError as problem:
        raise ImportError(
            f"this job was started with --backend farandole, and {sys.executable} has torch but not farandole "
            f"({problem}): install it there, or leave --backend out"
        ) from None
    if read_backend() == "farandole":  # a job inside this one may want another
        replace_gloo()


def _run_hidden() -> None:
    """Run the `sitecustomize` that would have been found without this one."""
    rest = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


finders: list[Any] = sys.meta_path
finders.insert(0, _AfterTorchDistributed)
_run_hidden()
