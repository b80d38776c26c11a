"""Images per second of a training step on random images, with the options and the output of Horovod's benchmark.

    farandole run -np 2 -- python horovod_synthetic_benchmark.py --model resnet50 --batch-size 32

Only the first import is Farandole's.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import farandole.horovod.torch as hvd
from farandole.bench.models import SmallCNN, resnet50

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=["resnet50", "cnn"], default="resnet50")
parser.add_argument("--batch-size", type=int, default=32, help="images per rank in a step")
parser.add_argument("--image-size", type=int, default=224, help="pixels of a side")
parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches before anything is measured")
parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches in one measurement")
parser.add_argument("--num-iters", type=int, default=10, help="measurements")
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16 bits")
parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum, not by their mean")
args = parser.parse_args()

hvd.init()
cuda = not args.no_cuda and torch.cuda.is_available()
device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
torch.set_num_threads(1)


def make_model():
    if args.model == "cnn":
        return nn.Sequential(SmallCNN(3, args.image_size), nn.Linear(10, 1000))
    return resnet50()


model = make_model().to(device)
lr_scaler = 1 if args.use_adasum else hvd.size()
if args.use_adasum and cuda and hvd.nccl_built():
    lr_scaler = hvd.local_size()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
target = torch.randint(1000, (args.batch_size,), device=device)


def benchmark_step():
    optimizer.zero_grad()
    cross_entropy(model(data), target).backward()
    optimizer.step()


def seconds_of(batches):
    begin = time.perf_counter()
    for _ in range(batches):
        benchmark_step()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def log(line):
    if hvd.rank() == 0:
        print(line, flush=True)


kind = "GPU" if cuda else "CPU"
log(f"Model: {args.model}")
log(f"Batch size: {args.batch_size}")
log(f"Number of {kind}s: {hvd.size()}")
log("Running warmup...")
seconds_of(args.num_warmup_batches)
log("Running benchmark...")
rates = []
for number in range(args.num_iters):
    rate = args.batch_size * args.num_batches_per_iter / seconds_of(args.num_batches_per_iter)
    log(f"Iter #{number}: {rate:.1f} img/sec per {kind}")
    rates.append(rate)

mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
log(f"Img/sec per {kind}: {mean:.1f} +-{spread:.1f}")
log(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
