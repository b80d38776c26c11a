"""What every Python of a job runs first whose ranks are recorded unasked, or use ``--backend farandole``.

Its folder stands first on the PYTHONPATH of the ranks and nowhere else; `launch.job.contract` puts it there. When
a program has imported `torch.distributed`, `farandole.backend.replace_gloo` follows; when it makes a
DistributedDataParallel, or calls FSDP2's `fully_shard`, `farandole.integrations.unasked.watch`; each does nothing
unless its variable says so. A program that does neither is left as it is, and imports nothing of this package. A
`sitecustomize` of the user's own, which this one hides, runs as without it.

[Note: a Python without farandole] A rank whose Python has torch and no farandole would use gloo, and wait for
ranks that do not. So the import of torch fails there. For recording it is left alone, and no rank is recorded.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

TYPE_CHECKING = False  # `typing` is not imported: every Python of the job would pay for it
if TYPE_CHECKING:
    from typing import Any

_HERE = Path(__file__).resolve().parent


class _AfterImport:
    """A finder of some modules of torch; they are the usual ones, with a call at the end of their import."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return torch's own spec, whose loader has the call."""
        call = _CALLS.get(fullname)
        if call is None:
            return None
        spec: Any = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: object) -> None:
            execute(module)
            call(module)

        spec.loader.exec_module = execute_and_call
        return spec


def _replace_gloo(_: Any) -> None:
    """See [Note: a Python without farandole]."""
    if os.environ.get("FARANDOLE_BACKEND") != "farandole":  # a job inside this one may want another
        return
    try:
        from farandole.backend import replace_gloo
    except ModuleNotFoundError as problem:
        raise ImportError(
            f"this job was started with --backend farandole, and {sys.executable} has torch but not farandole "
            f"({problem}): install it there, or leave --backend out"
        ) from None
    replace_gloo()


def watch_models(module: Any) -> None:
    """Have each DistributedDataParallel that is made be watched. `module` is the one that defines the class."""
    kind = module.DistributedDataParallel
    make = kind.__init__

    @wraps(make)
    def make_and_watch(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        _watch(self)

    kind.__init__ = make_and_watch


def watch_sharded(module: Any) -> None:
    """Have each model that is sharded be watched. `module` is the one that defines `fully_shard`."""
    shard = module.fully_shard

    @wraps(shard)
    def shard_and_watch(*arguments: Any, **named: Any) -> Any:
        sharded = shard(*arguments, **named)
        _watch(sharded)
        return sharded

    module.fully_shard = shard_and_watch


def _watch(model: Any) -> None:
    try:
        watch = import_module(_UNASKED).watch
    except Exception:  # it is not installed there, or another version
        return
    watch(model)


_UNASKED = "farandole.integrations.unasked"
_CALLS = {
    "torch.distributed": _replace_gloo,
    "torch.nn.parallel.distributed": watch_models,
    "torch.distributed.fsdp._fully_shard._fully_shard": watch_sharded,
}


def _run_hidden() -> None:
    """Run the `sitecustomize` that would have been found without this one."""
    rest = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


finders: list[Any] = sys.meta_path
finders.insert(0, _AfterImport)
_run_hidden()
