"""Elastic training with Horovod's API: training continues when ranks die and when hosts leave or join.

::

    farandole run -np 2 --min-np 1 -- python examples/horovod_elastic.py
    farandole run --min-np 2 --host-discovery-script ./hosts.sh -- python examples/horovod_elastic.py

To try it, kill one of the processes while they train. The data is synthetic: two classes on two rings.
"""

import argparse
import os

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import farandole.horovod.torch as hvd


def rings(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (count,), generator=generator)
    angles = torch.rand(count, generator=generator) * 6.2832
    radii = 1.0 + labels + 0.2 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--commit-every", type=int, default=5, help="batches from one commit to the next")
    parser.add_argument("--die-at", type=int, default=-1, help="batch of the first epoch at which rank 1 dies")
    words = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    dataset = rings(4096)
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    def scale_learning_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * hvd.size()

    @hvd.elastic.run
    def train(state) -> None:
        print(f"{hvd.size()} ranks, epoch {state.epoch}, batch {state.batch}", flush=True)
        while state.epoch < words.epochs:
            for images, labels in loader:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                if (state.epoch, state.batch, hvd.rank()) == (0, words.die_at, 1):
                    os.kill(os.getpid(), 9)
                state.batch += 1
                sampler.record_batch(state.batch, len(labels))
                if state.batch % words.commit_every == 0:
                    state.commit()
            state.epoch += 1
            state.batch = 0
            sampler.set_epoch(state.epoch)
            state.commit()
            loss = hvd.allreduce(loss.detach(), name="loss")
            if hvd.rank() == 0:
                print(f"epoch {state.epoch} loss {loss.item():.4f}", flush=True)

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
    state.register_reset_callbacks([scale_learning_rate])
    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main()
