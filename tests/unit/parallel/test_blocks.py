"""The repeated blocks of a model."""

from __future__ import annotations

from torch import nn

from farandole.parallel.blocks import repeated_blocks


class Block(nn.Module):
    """A layer of a transformer, as far as its structure goes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def test_the_layers_of_a_list_are_blocks_and_not_what_is_inside_them() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "layers": nn.ModuleList([Block(), Block()])})
    names = [name for name, _ in repeated_blocks(model)]
    assert names == ["layers.0", "layers.1"], f"blocks: {names}"


def test_sequences_of_blocks_stand_for_their_entries() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()), nn.Linear(4, 2)
    )
    names = [name for name, _ in repeated_blocks(model)]
    assert names == ["1.0", "1.1", "2.0", "2.1"], f"blocks: {names}"


def test_a_block_that_is_used_twice_counts_once() -> None:
    shared = Block()
    model = nn.ModuleList([shared, Block(), shared])
    names = [name for name, _ in repeated_blocks(model)]
    assert names == ["0", "1"], f"blocks: {names}"


def test_a_plain_stack_of_layers_has_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert repeated_blocks(model) == [], "layers without further modules are no blocks"


def stack(width: int = 4, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, width), act(), nn.Linear(width, 4))


def test_alike_sequences_of_layers_in_a_list_are_blocks() -> None:
    model = nn.ModuleDict(
        {"first": nn.Linear(4, 4), "layers": nn.ModuleList([stack(), stack(8), stack(4, nn.ReLU)])}
    )
    names = [name for name, _ in repeated_blocks(model)]
    assert names == ["layers.0", "layers.1"], f"of other classes is the third, of other sizes the second: {names}"
    assert repeated_blocks(nn.ModuleList([stack()])) == [], "one is not repeated"
    assert repeated_blocks(nn.Sequential(stack(), stack())) == [], "a sequence is its layers"
    shared = stack()
    both = nn.ModuleList([nn.ModuleList([shared, stack()]), nn.ModuleList([shared, stack()])])
    names = [name for name, _ in repeated_blocks(both)]
    assert names == ["0.0", "0.1", "1.1"], f"once each: {names}"


def test_sequences_in_a_list_stand_for_their_blocks_if_they_have_any() -> None:
    model = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())])
    names = [name for name, _ in repeated_blocks(model)]
    assert names == ["0.0", "0.1", "1.0", "1.1"], f"blocks: {names}"
