"""One unit of FSDP2, seen by its gradients: what they weigh, which are held, and which parameters were used.

FSDP2's own names, which are private, stand in this file and in `fsdp_passes`, and nowhere else.

[Note: a sign of negative zeros] Between the passes of a step the shards' gradients must show whether the loop has
cleared them: ``zero_grad`` sets them to None, or to zeros. A gradient that is zero is made -0.0, which adds
nothing to any number, stays when it is scaled, and is not there any more when it was set to 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from ...comm.engine.grad_ownership import drop_grads, replace_grad
from ...core.vocabulary.errors import ConfigError
from ..split import carry_marks
from .comm_coded import CodedReduceScatter, Members
from .exchange_records import unit_calls


class Unit:
    """A parameter group of FSDP2: what is gathered and reduced at once."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.members: list[Any] = list(group.fsdp_params)
        code = group._reduce_scatter_comm
        self.code = code if isinstance(code, CodedReduceScatter) else None
        """How the gradients travel; None: as they are."""
        self.used = [0.0] * len(self.members)
        """By member, whether this rank had a gradient for it since the last exchange."""
        self.halves: set[int] = set()
        """Members that are gathered in 16 bits; their gradients become float32 before they are added up."""
        self.reads: dict[int, torch.Tensor] = {}
        """Gradients, in float32, of what this pass read of these beside products."""
        self.watches_reads = True
        self.copies: list[tuple[int, torch.Tensor, int]] = []
        """What the first forward pass read so, and how often it had been changed: no shard would see that."""
        self._had: dict[int, bool] = {}
        """Whether a shard had a gradient before the passes since the last exchange, by member."""
        self._signs: dict[int, torch.Tensor] = {}
        """The gradients of shards between the passes of a step. See [Note: a sign of negative zeros]."""
        self._placeholders: set[int] = set()
        """Members whose shard has such a gradient, and no other."""
        self._reduce = group.post_backward
        self._is_reducing = False
        self._versions: dict[int, int] = {}
        """How often a member's gathered parameter had been changed when it was made."""
        for i, each in enumerate(self.members):
            self._when_gathered(i, each)
            trains = each.sharded_param.requires_grad
            if each.sharded_param.is_floating_point():  # else it is packed, and never trains
                each.sharded_param.requires_grad_(True).register_post_accumulate_grad_hook(partial(self._added, i))
                each.sharded_param.requires_grad_(trains)

    @property
    def name(self) -> str:
        """The unit in words, the same on all ranks."""
        name = self.group._module_fqn
        return f"block {name!r}" if name else "what is in no block"

    @property
    def place(self) -> str:
        """The unit and the direction of the pass that it is in."""
        return f"{self.name}, {'forward' if self.group._training_state.name == 'FORWARD' else 'backward'}"

    @property
    def trained(self) -> Members:
        """Names and shapes of the parameters that are reduced, in order."""
        return tuple((each._param_fqn, tuple(each._orig_size)) for each in self.members if self._trains(each))

    def gathered(self) -> list[torch.Tensor]:
        """Return the parameters that modules have while they are gathered."""
        return [each._unsharded_param for each in self.members if hasattr(each, "_unsharded_param")]

    def changed_in_place(self) -> list[str]:
        """Return the names of parameters that were changed while they were gathered, which no shard sees."""
        gathered = [(i, self.members[i]._unsharded_param, version) for i, version in self._versions.items()]
        names = [
            self.members[i]._param_fqn
            for i, each, version in (*gathered, *self.copies)
            if each._version != version
        ]
        self.watches_reads = False
        self.copies.clear()
        return list(dict.fromkeys(names))

    def forget_gathered(self) -> None:
        """Drop parameters that are on their way, and that no module has waited for."""
        result = self.group._all_gather_result
        if result is not None:
            if result.all_gather_work is not None:
                result.all_gather_work.wait()
            self.group._all_gather_result = None

    def refuse_replaced(self) -> None:
        """Raise `ConfigError` where a module has another tensor instead of a parameter of this unit."""
        for each in self.members:
            place = each._module_info
            found = place.module._parameters.get(place.param_name)
            is_gathered = each.sharded_state == ShardedState.UNSHARDED
            if found is not (each._unsharded_param if is_gathered else each.sharded_param):
                raise ConfigError(
                    f"zero = 3: another tensor stands for parameter {each._param_fqn!r}, as with "
                    "torch.func.functional_call",
                    remedy="call the model with its own parameters, or use zero = 2",
                )

    def follow_requires_grad(self) -> None:
        """Let gathered parameters train or not as their shards do, which the loop may have changed."""
        for each in self.members:
            if hasattr(each, "_unsharded_param"):
                trains = each.sharded_param.requires_grad
                if each._unsharded_param.requires_grad != trains:
                    each._unsharded_param.requires_grad_(trains)

    # -- a backward pass -----------------------------------------------------------------------

    @torch.no_grad()
    def weigh(self, factor: float) -> None:
        """Scale the gradients that have just come by this rank's share of the samples."""
        for i, each in enumerate(self.members):
            self._had.setdefault(i, each.sharded_param.grad is not None)
            gradient = self._take_half(i) if i in self.halves else self._gradient(each)
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise ConfigError(
                    f"zero = 3: the gradient of parameter {each._param_fqn!r} is sparse, which cannot be sharded",
                    remedy="make its layer with sparse=False, or use zero = 0",
                )
            self.used[i] = 1.0
            if factor == 0.0:
                gradient.zero_()  # not a product: a placeholder's gradients may be NaN
            elif factor != 1.0:
                gradient.mul_(factor)
            if i in self.halves:
                before = each.unsharded_accumulated_grad
                each.unsharded_accumulated_grad = gradient if before is None else before.add_(gradient)

    @staticmethod
    def _gradient(member: Any) -> torch.Tensor | None:
        return member._unsharded_param.grad if hasattr(member, "_unsharded_param") else None

    def _take_half(self, index: int) -> torch.Tensor | None:
        """Return the gradient of this pass in float32, and leave none in 16 bits."""
        gradient, read = self._gradient(self.members[index]), self.reads.pop(index, None)
        if gradient is None:
            return read
        drop_grads([self.members[index]._unsharded_param])
        if gradient.layout != torch.strided:
            return gradient
        return gradient.float() if read is None else read.add_(gradient)

    @torch.no_grad()
    def hold(self) -> None:
        """Set aside what came in a pass that is not reduced. See [Note: passes that are held]."""
        for i, each in enumerate(self.members):
            if not hasattr(each, "_unsharded_param"):
                continue
            if each._unsharded_param.grad is not None:
                each.unsharded_accumulated_grad = each._unsharded_param.grad
                drop_grads([each._unsharded_param])
            if each.unsharded_accumulated_grad is not None and i not in self._signs:
                if each.sharded_param.grad is None:
                    self._placeholders.add(i)
                self._signs[i] = _leave_sign(each.sharded_param)

    @torch.no_grad()
    def note_sum(self) -> None:
        """Note which gradients the shards have after a pass that is not the last one of a step."""
        self._placeholders.clear()
        for i, each in enumerate(self.members):
            if each.sharded_param.grad is not None:
                self._signs[i] = _leave_sign(each.sharded_param)

    def was_cleared(self) -> bool:
        """Return whether the loop has cleared a gradient since passes are held."""
        now = {i: self.members[i].sharded_param.grad for i in self._signs}
        return any(now[i] is not sign or _is_positive_zero(sign) for i, sign in self._signs.items())

    def drop_held(self) -> None:
        """Forget what is held."""
        self.reads.clear()
        for i, each in enumerate(self.members):
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                drop_grads([each._unsharded_param])
            if i in self._placeholders and each.sharded_param.grad is self._signs[i]:
                drop_grads([each.sharded_param])
        self._forget()

    @property
    def shards(self) -> Any:
        """The group of the ranks that hold the shards of one copy."""
        return self.group._all_gather_process_group

    def reduce(self) -> None:
        """End the unit's backward pass as FSDP2 does."""
        self._is_reducing = True
        if self.group.reduce_grads:
            self._fill_unused()
        try:
            if not self.group._is_hsdp:
                self._reduce()
                return
            with unit_calls(self.group._all_reduce_process_group, f"for {self.place}"):
                self._reduce()
        finally:
            self._is_reducing = False

    def _fill_unused(self) -> None:
        """FSDP2 reduces zeros where a parameter has no gradient: of the type that it was gathered in."""
        for i in self.halves:
            each = self.members[i]
            if self._gradient(each) is None and each.unsharded_accumulated_grad is None and self._trains(each):
                each.unsharded_accumulated_grad = torch.zeros(each._orig_size, device=each.device)

    @staticmethod
    def _trains(member: Any) -> bool:
        return hasattr(member, "_unsharded_param") and member._unsharded_param.requires_grad

    def reduce_now(self) -> None:
        """Reduce what is held, outside a backward pass."""
        self.group.reduce_grads = True
        self.reduce()
        self.group.finalize_backward()
        self.group._training_state = type(self.group._training_state).IDLE

    def drop_unused(self, counts: list[float]) -> None:
        """Leave parameters that no rank used without a gradient. `counts`: ranks that did, by member."""
        for i, each in enumerate(self.members):
            if counts[i] == 0 and not self._had.get(i):
                drop_grads([each.sharded_param])
        self._forget()

    def _when_gathered(self, index: int, member: Any) -> None:
        """Let the gathered parameter be the same part of a whole one as its shards are."""
        plain = member.init_unsharded_param

        def init() -> None:
            plain()
            carry_marks(member.sharded_param, member._unsharded_param)
            if index not in self._versions and not member._unsharded_param.is_inference():
                self._versions[index] = member._unsharded_param._version

        member.init_unsharded_param = init

    @torch.no_grad()
    def _added(self, index: int, shard: torch.Tensor) -> None:
        """Note a gradient that the loss gave a shard by itself, as a penalty does: zeros of it clear nothing."""
        if self._is_reducing:
            return  # FSDP2 calls such hooks too
        self._had[index] = True
        self._placeholders.discard(index)
        if index in self._signs:
            self._signs[index] = _leave_sign(shard)

    def _forget(self) -> None:
        self.used = [0.0] * len(self.members)
        self._had.clear()
        self._signs.clear()
        self._placeholders.clear()


def _leave_sign(shard: Any) -> torch.Tensor:
    """Return the gradient of `shard`, made if there is none; where it is zero, it is -0.0 from now on."""
    if shard.grad is None:
        replace_grad(shard, torch.zeros_like(shard, memory_format=torch.contiguous_format).detach())
    gradient: Any = shard.grad
    local = gradient.to_local()
    if not local.any():
        local.fill_(-0.0)
    return shard.grad  # type: ignore[no-any-return]


def _is_positive_zero(gradient: Any) -> bool:
    local = gradient.to_local().reshape(-1)
    if not local.numel() or local[0] != 0 or local.any():
        return False
    return not torch.signbit(local[0])


def units_of(state: Any) -> list[Unit]:
    """Return the units of a model, by the state of its root, in the order of its modules."""
    return [Unit(group) for each in state._state_ctx.all_states for group in each._fsdp_param_groups]
