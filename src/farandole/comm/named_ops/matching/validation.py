"""What one rank alone can see is wrong with a request, in the words that scripts written for Horovod look for."""

from __future__ import annotations

from ....core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from ....core.vocabulary.errors import ConfigError
from ...codecs.registry import make_codec
from ..data.reductions import refuse_reduction
from ..operations.request import Request
from ..operations.signature import DTYPE_NAMES, Signature

_REDUCTIONS = ("sum", "average", "min", "max", "product", "adasum")
_KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")
_LONGEST_NAME = 4096

DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
    "currently being processed. If you want to request another tensor, use a different tensor name."
)


def not_a_member(kind: str, rank: int) -> ConfigError:
    """Return the error for an operation of a set without this rank."""
    return ConfigError(f"{kind.capitalize()}: Rank {rank} is not a member of the provided process set.")


def unknown_set(kind: str, number: int) -> ConfigError:
    """Return the error for an unknown set."""
    return ConfigError(
        f"{kind.capitalize()}: Process set provided does not exist, or has not been registered.",
        remedy=f"set {number} was not added, or was removed",
    )


def check(request: Request, members: tuple[int, ...]) -> None:
    """Raise `ConfigError` for a request that cannot be carried out whatever the other ranks say."""
    kind, tensor, name = request.kind, request.tensor, request.name
    if kind not in _KINDS:
        raise ConfigError(f"{name}: unknown kind {kind!r}", remedy=f"one of {', '.join(_KINDS)}")
    if not name or len(name) > _LONGEST_NAME:
        raise ConfigError(f"a name of {len(name)} characters: expected 1 to {_LONGEST_NAME}")
    if kind == "barrier":
        return
    if tensor is None:
        raise ConfigError(f"{kind} {name}: there is no tensor")
    if tensor.dtype not in DTYPE_NAMES:
        raise ConfigError(f"{kind} {name}: Tensor type {tensor.dtype} is not supported.")
    if tensor.is_sparse or tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{kind} {name}: a {tensor.layout} tensor on {tensor.device} cannot travel")
    if kind in ("allreduce", "reducescatter"):
        _check_reduction(request, kind)
    if kind == "broadcast" and request.root not in members:
        raise ConfigError(f"broadcast received invalid root rank {request.root} for provided process set")
    if kind == "alltoall":
        _check_splits(request, len(members))


def _check_reduction(request: Request, kind: str) -> None:
    assert request.tensor is not None, "checked before"
    dtype = request.tensor.dtype
    if request.reduction not in _REDUCTIONS:
        raise ConfigError(
            f"{kind} {request.name}: unknown reduction {request.reduction!r}",
            remedy=f"one of {', '.join(_REDUCTIONS)}",
        )
    if kind == "reducescatter" and request.reduction not in ("sum", "average"):
        raise ConfigError("Reducescatter currently only supports AVERAGE and SUM.")
    reason = refuse_reduction(dtype, request.reduction)
    if reason:
        raise ConfigError(f"{kind} {request.name}: the {request.reduction} of {dtype} is not supported: {reason}")
    if request.codec == NONE:
        return
    if kind != "allreduce" or request.reduction not in ("sum", "average") or not dtype.is_floating_point:
        raise ConfigError(
            f"{kind} {request.name}: codec {request.codec} with the {request.reduction} of {dtype}",
            remedy="codecs carry the sum or average of floating-point numbers in an allreduce",
        )
    if request.codec != AUTO:
        make_codec(CodecSpec.parse(request.codec))
    elif not request.chosen_with:
        raise ConfigError(
            f"{kind} {request.name}: codec {AUTO} is chosen for the gradients of an optimizer or a tape",
            remedy="name a codec",
        )


def _check_splits(request: Request, size: int) -> None:
    assert request.tensor is not None, "checked before"
    rows = request.tensor.shape[0] if request.tensor.dim() else 0
    splits = request.splits
    if splits is None:
        if request.tensor.dim() and rows % size:
            raise ConfigError(
                "splits not provided, but first dimension of tensor is not an even multiple "
                "of the number of workers.",
                remedy=f"{rows} rows for {size} ranks",
            )
        return
    if len(splits) != size:
        raise ConfigError(
            "Number of entries in splits does not equal number of workers.",
            remedy=f"{len(splits)} entries for {size} ranks",
        )
    if min(splits) < 0:
        raise ConfigError(f"splits {list(splits)}: expected no negative number of rows")
    if sum(splits) > rows:
        raise ConfigError(
            "Sum of splits entries is greater than the first dimension of tensor.",
            remedy=f"{sum(splits)} rows to be sent, {rows} are there",
        )


def sign(request: Request, serial: int, size: int, group: tuple[str, ...]) -> Signature:
    """Return the signature of a request that was checked. What does not matter for its kind is left out."""
    kind, tensor = request.kind, request.tensor
    if tensor is None:
        return Signature(request.name, serial, kind, group=group)
    splits: tuple[int, ...] = ()
    if kind == "alltoall":
        rows = tensor.shape[0] if tensor.dim() else 0
        splits = tuple(request.splits) if request.splits is not None else (rows // size,) * size
    reduces = kind in ("allreduce", "reducescatter")
    return Signature(
        request.name,
        serial,
        kind,
        DTYPE_NAMES[tensor.dtype],
        tuple(tensor.shape),
        request.reduction if reduces else "sum",
        request.prescale if reduces else 1.0,
        request.postscale if reduces else 1.0,
        request.root if kind == "broadcast" else 0,
        splits,
        request.codec if kind == "allreduce" else NONE,
        tensor.device.type,
        group,
        request.chosen_with if request.codec == AUTO else "",
    )
