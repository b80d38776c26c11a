"""A Llama of transformers over data x shard x tensor, from one plan file, by the loop of one process.

    farandole run -np 8 --plan examples/llama_3d.toml -- python examples/llama_3d.py
    farandole run -np 1 --set clip_norm=1.0 -- python examples/llama_3d.py

Both print the same losses. The plan is the only place that knows how the ranks divide the model: other degrees, or
none, need no change here.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import farandole as fd


def sequences(count: int, words: int, length: int) -> list[torch.Tensor]:
    """Return sequences in which each word follows from the one before."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, words, (count, 1), generator=generator)
    return list((first + 3 * torch.arange(length)) % words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    world = fd.init()
    fd.seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    whole = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-4)
    model, optimizer = fd.distribute(model, optimizer)
    loader = fd.shard(DataLoader(sequences(16 * arguments.steps, 64, 24), batch_size=16), split=True)

    for step, tokens in enumerate(loader):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            fd.print(f"step {step + 1}: loss {fd.mean(loss.item()):.4f}")
    here = sum(states.numel() for states in local_states(optimizer))
    fd.print(f"{world.degrees}: {here} elements of states on this rank, of {2 * whole}")


def local_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return what this rank has of Adam's two states of each parameter."""
    states = [each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [each.to_local() if hasattr(each, "to_local") else each for each in states]


if __name__ == "__main__":
    main()
