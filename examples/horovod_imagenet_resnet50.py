"""A typical Horovod script: ResNet-50 with warm-up and checkpoints. Only the first import is Farandole's.

    farandole run -np 4 -- python horovod_imagenet_resnet50.py --train-dir imagenet/train --val-dir imagenet/val

The learning rate is scaled by the number of ranks and warmed up (Goyal et al., "Accurate, large minibatch SGD",
2017). Without directories it trains on random images. A directory has one directory of images per class (read
by Pillow).
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import farandole.horovod.torch as hvd

# torchvision.models.resnet50 is the same network.
from farandole.bench.models import resnet50

parser = argparse.ArgumentParser()
parser.add_argument("--train-dir", type=Path, help="training images (default: random ones)")
parser.add_argument("--val-dir", type=Path, help="validation images (default: random ones)")
parser.add_argument("--synthetic-images", type=int, default=1280, help="how many random images")
parser.add_argument("--image-size", type=int, default=224, help="pixels of a side")
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--workers", type=int, default=0, help="processes of each rank that read images")
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar")
parser.add_argument("--batch-size", type=int, default=32, help="images per rank in a backward pass")
parser.add_argument("--val-batch-size", type=int, default=32)
parser.add_argument("--batches-per-allreduce", type=int, default=1, help="backward passes before an exchange")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--base-lr", type=float, default=0.0125, help="learning rate of one rank")
parser.add_argument("--warmup-epochs", type=float, default=5)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005, help="weight decay")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16 bits")
parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum, not by their mean")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class ImageDirectory(Dataset):
    """The images below a directory; the class of an image is its directory."""

    def __init__(self, directory):
        classes = sorted(path.name for path in directory.iterdir() if path.is_dir())
        self.images = [
            (path, i) for i, name in enumerate(classes) for path in sorted((directory / name).iterdir())
        ]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        from PIL import Image

        path, label = self.images[index]
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((args.image_size, args.image_size))
        pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
        return pixels.view(args.image_size, args.image_size, 3).permute(2, 0, 1) / 127.5 - 1, label


class RandomImages(Dataset):
    """A given number of random images, the same in every run."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, args.image_size, args.image_size, generator=generator), index % args.classes


def make_loader(directory, batch_size, shuffle):
    dataset = ImageDirectory(directory) if directory else RandomImages(args.synthetic_images)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=args.workers)


class Metric:
    """Return the mean of a value over the ranks."""

    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name).item()
        self.count += 1

    @property
    def mean(self):
        return self.sum / max(self.count, 1)


def adjust_learning_rate(epoch, batch):
    """Warm the rate up from that of one rank to that of all; divide it by 10 at epochs 30, 60 and 80."""
    position = epoch + (batch + 1) / len(train_loader)
    if position < args.warmup_epochs:
        factor = (position * (hvd.size() - 1) / args.warmup_epochs + 1) / hvd.size()
    else:
        factor = 0.1 ** sum(epoch >= drop for drop in (30, 60, 80))
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * factor


def train(epoch):
    model.train()
    train_loader.sampler.set_epoch(epoch)
    loss_of_epoch, accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch)
        optimizer.zero_grad()
        # The batch may be larger than what fits into memory at once.
        parts = list(zip(data.split(args.batch_size), target.split(args.batch_size), strict=True))
        for images, labels in parts:
            output = model(images.to(device))
            loss = cross_entropy(output, labels.to(device))
            accuracy.update((output.argmax(1).cpu() == labels).float().mean())
            loss_of_epoch.update(loss)
            (loss / len(parts)).backward()
        optimizer.step()
    return loss_of_epoch.mean, accuracy.mean


def validate():
    model.eval()
    loss, accuracy = Metric("val_loss"), Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            output = model(data.to(device)).cpu()
            loss.update(cross_entropy(output, target))
            accuracy.update((output.argmax(1) == target).float().mean())
    return loss.mean, accuracy.mean


args = parser.parse_args()
hvd.init()
torch.manual_seed(args.seed)
cuda = not args.no_cuda and torch.cuda.is_available()
device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
torch.set_num_threads(1)

# Rank 0 looks for the last checkpoint and broadcasts the epoch to resume from.
resume_from_epoch = 0
if hvd.rank() == 0:
    for epoch in range(args.epochs, 0, -1):
        if Path(args.checkpoint_format.format(epoch=epoch)).exists():
            resume_from_epoch = epoch
            break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

train_loader = make_loader(args.train_dir, args.batch_size * args.batches_per_allreduce, shuffle=True)
val_loader = make_loader(args.val_dir, args.val_batch_size, shuffle=False)

model = resnet50(args.classes).to(device)
lr_scaler = args.batches_per_allreduce * (1 if args.use_adasum else hvd.size())
optimizer = torch.optim.SGD(
    model.parameters(), lr=args.base_lr * lr_scaler, momentum=args.momentum, weight_decay=args.wd
)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)

if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    print(f"Resuming after epoch {resume_from_epoch}")
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(resume_from_epoch, args.epochs):
    train_loss, train_accuracy = train(epoch)
    val_loss, val_accuracy = validate()
    if hvd.rank() == 0:
        rate = optimizer.param_groups[0]["lr"]
        print(
            f"Epoch {epoch + 1}: lr {rate:.5f}, loss {train_loss:.3f}, accuracy {100 * train_accuracy:.1f}%, "
            f"val_loss {val_loss:.3f}, val_accuracy {100 * val_accuracy:.1f}%"
        )
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))
