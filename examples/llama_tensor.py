"""A Llama of transformers, made from a configuration, with every layer divided over the ranks.

    farandole run -np 2 -- python examples/llama_tensor.py
    farandole run -np 4 -- python examples/llama_tensor.py --data 2

The model's code is transformers' own. The loop is that of one process: no rank ever has the whole logits, because
the loss is taken from their parts.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import farandole as fd


def batches(count: int, size: int, words: int, length: int) -> list[torch.Tensor]:
    """Return sequences (size, length) in which each word follows from the one before."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, words, (count, size, 1), generator=generator)
    return list((first + 3 * torch.arange(length)) % words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", type=int, default=1, help="replicas; the other ranks divide the layers")
    arguments = parser.parse_args()

    fd.init()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    whole = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    plan = fd.Plan(data=arguments.data, tensor="rest") if fd.world().size > 1 else fd.Plan()
    model, optimizer = fd.distribute(model, optimizer, plan)

    loss = torch.tensor(0.0)
    for tokens in batches(arguments.steps, 16, 61, 24):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    here = sum(parameter.numel() for parameter in model.parameters())
    fd.print(f"parameters: {here} on this rank, {whole} in all")
    fd.print(f"loss {loss.item():.3f} after {arguments.steps} steps")


if __name__ == "__main__":
    main()
