"""Changes that make no difference any test could see, judged by hand.

By what stood there and what stands there then, as the survivors' list prints them: lines may move, files too. An
entry that no longer matches anything is harmless and is to be deleted.
"""

from __future__ import annotations

_ANY_SEED = "any seed is as good, and all ranks take the same"
_AT_LEAST_ONE = "a positive share of a positive count, rounded up, is at least one"

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "drawn = torch.rand(_NOISE_ELEMENTS, dtype=torch.float32, generator=torch.Generator().manual_seed(20211))",
        "drawn = torch.rand(_NOISE_ELEMENTS, dtype=torch.float32, generator=torch.Generator().manual_seed(20212))",
    ): _ANY_SEED,
    (
        "generator = torch.Generator().manual_seed(state.get('shared_seed', 0) * 1000003 + draws)",
        "generator = torch.Generator().manual_seed(state.get('shared_seed', 1) * 1000003 + draws)",
    ): _ANY_SEED,
    ("steps == 0 or step > steps", "steps == 1 or step > steps"): "of one step, too, the only density is the last",
    (
        "kept = min(count, max(1, math.ceil(count * density(state))))",
        "kept = min(count, max(0, math.ceil(count * density(state))))",
    ): _AT_LEAST_ONE,
    (
        "kept = min(count, max(1, math.ceil(count * density)))",
        "kept = min(count, max(0, math.ceil(count * density)))",
    ): _AT_LEAST_ONE,
    (
        "return np.flatnonzero(np.unpackbits(coded[:-(-self.count // 8)], count=self.count))",
        "return np.flatnonzero(np.unpackbits(coded[:-(-self.count * 8)], count=self.count))",
    ): "`count` says where to stop",
    ("divisor != 1", "True"): "division by one changes nothing",
}
"""Before and after, and the reason."""
