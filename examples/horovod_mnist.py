"""A typical Horovod script: a CNN on MNIST or Fashion-MNIST. Only the first import is Farandole's.

    apt-get install dataset-fashion-mnist
    farandole run -np 2 -- python horovod_mnist.py --epochs 1

With ``import horovod.torch as hvd`` instead, start it with ``farandole run --as-horovod -np 2 -- ...``.
The data is a directory with the four gzipped IDX files.
"""

import argparse
import gzip
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import farandole.horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
parser.add_argument("--images", type=int, default=60000, help="how many training images to use")
parser.add_argument("--batch-size", type=int, default=64, help="images per rank in a step")
parser.add_argument("--test-batch-size", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank")
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=10, help="batches between two lines")
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16 bits")
parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum, not by their mean")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Net(nn.Module):
    """Two convolutions and two linear layers; (batch, 1, 28, 28) to (batch, 10)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = torch.max_pool2d(self.conv1(x), 2).relu()
        x = torch.max_pool2d(self.drop(self.conv2(x)), 2).relu()
        x = self.fc1(x.flatten(1)).relu()
        return self.fc2(nn.functional.dropout(x, training=self.training))


def read_idx(path, header_bytes):
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()[header_bytes:]), dtype=torch.uint8)


def read_images(directory, part):
    pixels = read_idx(directory / f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
    labels = read_idx(directory / f"{part}-labels-idx1-ubyte.gz", 8)
    return TensorDataset((pixels / 255 - 0.286) / 0.353, labels.long())


def train(epoch):
    model.train()
    # Each epoch has a new order, the same on all ranks; each rank takes its part of it.
    train_sampler.set_epoch(epoch)
    for batch, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(data.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0 and hvd.rank() == 0:
            done, whole = batch * len(data), len(train_sampler)
            print(f"Train Epoch: {epoch} [{done}/{whole} ({100 * batch // len(train_loader)}%)]\tLoss: {loss:.6f}")


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test():
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device)).cpu()
            loss += cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).float().sum().item()
    loss = metric_average(loss / len(test_sampler), "avg_loss")
    accuracy = metric_average(correct / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%")


args = parser.parse_args()
hvd.init()
torch.manual_seed(args.seed)
cuda = not args.no_cuda and torch.cuda.is_available()
device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
torch.set_num_threads(1)

train_dataset, test_dataset = read_images(args.data_dir, "train"), read_images(args.data_dir, "t10k")
train_dataset = torch.utils.data.Subset(train_dataset, range(min(args.images, len(train_dataset))))
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
test_sampler = DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = DataLoader(test_dataset, batch_size=args.test_batch_size, sampler=test_sampler)

model = Net().to(device)
# The global batch grows with the ranks, and the learning rate with it. Adasum scales by itself.
lr_scaler = 1 if args.use_adasum else hvd.size()
if args.use_adasum and cuda and hvd.nccl_built():
    lr_scaler = hvd.local_size()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)

# All ranks start with the state of rank 0.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)

for epoch in range(1, args.epochs + 1):
    train(epoch)
    test()
