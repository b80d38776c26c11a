"""Training scripts of varied shape, as people write them; all end after a few steps."""

from __future__ import annotations

DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 8, generator=g), torch.randn(64, 1, generator=g))
"""

PLAIN = (
    DATA
    + """
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} {loss.item():.3f}")
"""
)

FUNCTIONS = '''#!/usr/bin/env python3
"""MNIST as in PyTorch's examples: train() and test() are given all they need by main()."""
from __future__ import print_function

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            correct += (output.argmax(1) == target.to(device)).sum().item()
    print(f"correct {correct} of {len(test_loader.dataset)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--log-interval", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cpu")

    x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
    dataset1 = torch.utils.data.TensorDataset(x, y)
    train_kwargs = {"batch_size": args.batch_size, "shuffle": True}
    train_loader = torch.utils.data.DataLoader(dataset1, **train_kwargs)
    test_loader = torch.utils.data.DataLoader(dataset1, batch_size=32)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
'''

TRAINER_CLASS = (
    DATA
    + '''

class Trainer:
    """Holds all of it."""

    def __init__(self, epochs):
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = DataLoader(data, batch_size=8, shuffle=True)
        self.epochs = epochs

    def train_step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def fit(self):
        for epoch in range(self.epochs):
            for batch in self.loader:
                loss = self.train_step(batch)


if __name__ == "__main__":
    Trainer(2).fit()
'''
)

GIVEN_TRAINER = (
    DATA
    + """

class Trainer:
    def __init__(self, model, loader, optimizer):
        self.model, self.optimizer = model, optimizer
        self.loader = loader

    def fit(self):
        for step, (x, y) in enumerate(self.loader):
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()


def main() -> None:
\tmodel = nn.Linear(8, 1)
\topt = torch.optim.Adam(model.parameters())
\ttrain_dl = DataLoader(data, batch_size=4)
\tval_dl = DataLoader(data, batch_size=32)
\tTrainer(model, loader=train_dl, optimizer=opt).fit()
\twith torch.no_grad():
\t\tprint(sum(nn.functional.mse_loss(model(x), y) for x, y in val_dl))


if __name__ == '__main__':
\tmain()
"""
)

GAN = (
    DATA
    + """
loader = DataLoader(data, batch_size=8, shuffle=True)
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
netD = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
for epoch in range(2):
    for i, (real, _) in enumerate(loader, 0):
        one, zero = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        netD.zero_grad()
        fake = netG(torch.randn(len(real), 4))
        (bce(netD(real), one) + bce(netD(fake.detach()), zero)).backward()
        optimizerD.step()
        netG.zero_grad()
        bce(netD(fake), one).backward()
        optimizerG.step()
"""
)

AMP = (
    DATA
    + """
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
decay = [p for n, p in model.named_parameters() if p.dim() > 1]
rest = [p for n, p in model.named_parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
    lr=1e-3,
)
model.to(device)
scaler = torch.amp.GradScaler(device)
train_loader = DataLoader(data, batch_size=8, shuffle=True,
                          num_workers=0)
fd = open("/dev/null")
for x, y in train_loader:
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.mse_loss(model(x.to(device)).float(), y.to(device))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""
)

HELPERS = (
    DATA
    + """

def get_loaders(batch_size):
    train = DataLoader(data, batch_size=batch_size, shuffle=True)
    val = DataLoader(data, batch_size=32)
    return train, val


def build_optimizer(net, name="sgd"):
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1)
    return torch.optim.Adam(net.parameters())


def run(batch_size: int = 8):
    train_loader, val_loader = get_loaders(batch_size)
    net = nn.Linear(8, 1)
    optimizer = build_optimizer(net, "sgd")
    best = None
    for epoch in range(2):
        net.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            best = sum(nn.functional.mse_loss(net(x), y).item() for x, y in val_loader)
    return best


run()
"""
)

BRANCHES = (
    DATA
    + """
import sys

NAME = sys.argv[1] if len(sys.argv) > 1 else "adam"


def main():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    if NAME == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    elif NAME == "sgd": optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        raise SystemExit("no such optimizer")
    if len(data) > 10:
        loader = DataLoader(data, batch_size=8)
    else:
        loader = DataLoader(data, batch_size=4)
    it = iter(loader)
    for step in range(4):
        x, y = next(it)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
"""
)

TWO_OPTIMIZERS = (
    DATA
    + '''
class Data(DataLoader):
    """A loader of our own."""

model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 1)})
opt_body = torch.optim.SGD(model["body"].parameters(), lr=0.1)
opt_head = torch.optim.Adam(model["head"].parameters())
batches = Data(data, batch_size=8)
for x, y in batches:
    loss = nn.functional.mse_loss(model["head"](model["body"](x)), y)
    opt_body.zero_grad(); opt_head.zero_grad()
    loss.backward()
    opt_body.step(); opt_head.step()
'''
)

OWN_MODULE = (
    DATA
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def fit(self, loader, steps):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        done = 0
        while done < steps:
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(self.layer(x), y).backward()
                optimizer.step()
                done += 1


if __name__ == "__main__":
    train_data = DataLoader(data, batch_size=8)
    Net().fit(train_data, 8)
"""
)

EVAL_FIRST = (
    DATA
    + """
def evaluate(model, dl):
    with torch.no_grad():
        return sum(float(nn.functional.mse_loss(model(x), y)) for x, y in dl) / len(dl)


test = DataLoader(data, batch_size=16)
train = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
model = nn.Linear(8, 1)
teacher = nn.Linear(8, 1).eval()
optim = torch.optim.RMSprop(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 10)
for epoch in range(4):
    for i, (x, y) in enumerate(train):
        with torch.no_grad():
            y = teacher(x)
        loss = nn.functional.mse_loss(model(x), y) / 2
        loss.backward()
        if i % 2 == 1:
            optim.step()
            optim.zero_grad()
    sched.step()
    print(evaluate(model, test))
"""
)

WINDOWS_ENDS = PLAIN.replace("\n", "\r\n")

CAN = {
    "plain": PLAIN,
    "functions": FUNCTIONS,
    "trainer_class": TRAINER_CLASS,
    "given_trainer": GIVEN_TRAINER,
    "gan": GAN,
    "amp": AMP,
    "helpers": HELPERS,
    "branches": BRANCHES,
    "two_optimizers": TWO_OPTIMIZERS,
    "own_module": OWN_MODULE,
    "eval_first": EVAL_FIRST,
    "windows_ends": WINDOWS_ENDS,
}

CANNOT = {
    "ddp": (
        DATA + "model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))\nmodel(1).backward()\n",
        r"cannot.py:7: DistributedDataParallel distributes this training already",
    ),
    "sampler": (
        PLAIN.replace("shuffle=True", "sampler=torch.utils.data.distributed.DistributedSampler(data)"),
        r"cannot.py:8: a DistributedSampler distributes",
    ),
    "fully_shard": (
        "from torch.distributed.fsdp import fully_shard\n" + PLAIN + "fully_shard(model)\n",
        "fully_shard distributes",
    ),
    "farandole": (
        PLAIN.replace("import torch\n", "import torch\nimport farandole as fd\n", 1),
        "uses farandole already",
    ),
    "horovod": (
        PLAIN.replace("import torch\n", "import torch\nimport horovod.torch as hvd\n", 1),
        r"run --as-horovod -np 2",
    ),
    "lightning": (
        "import torch\nimport lightning as L\nclass M(L.LightningModule):\n    pass\n",
        "inside Lightning's Trainer; it has its own way",
    ),
    "transformers": (
        "import torch\nfrom transformers import Trainer\nTrainer(model=None).train()\n",
        "inside transformers' Trainer; it has its own way",
    ),
    "accelerate": (
        PLAIN + "\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n",
        "inside accelerate's Accelerator; it has its own way",
    ),
    "ignite": (
        DATA + "from ignite import engine\ntrainer = engine.create_supervised_trainer(None, None)\n",
        r"inside Ignite's engine; add the lines by hand: .*trainer.run\(fd.shard\(loader\)\)",
    ),
    "ignite_engine": (
        PLAIN + "import ignite.engine\ntrainer = ignite.engine.Engine(lambda engine, batch: None)\n",
        "inside Ignite's engine",
    ),
    "skorch": (
        DATA + "from skorch import NeuralNetClassifier\nnet = NeuralNetClassifier(nn.Linear)\n",
        "inside skorch's estimator; add the lines by hand: fd.distribute in initialize_optimizer",
    ),
    "skorch_subclass": (
        DATA + "import skorch\nclass Mine(skorch.NeuralNet):\n    pass\n",
        r"cannot.py:8: the loop is inside skorch's estimator",
    ),
    "no_loop": (DATA + "model = nn.Linear(8, 1)\nprint(model(data[0][0]))\n", "nothing in it calls backward"),
    "keras": (
        "import keras\nmodel = keras.Sequential([keras.layers.Dense(1)])\nmodel.fit([[1]], [1])\n",
        "trains with Keras, and init changes scripts for PyTorch only; add .* docs/horovod-tensorflow.md shows",
    ),
    "tf_keras": (
        "import tensorflow as tf\nmodel = tf.keras.Sequential([])\nmodel.fit([[1]], [1])\n",
        "trains with Keras, and init changes",
    ),
    "keras_on_torch": (
        "import torch\nfrom keras import layers\nmodel = layers.Dense(1)\nmodel.fit(torch.ones(1), [1])\n",
        "trains with Keras, and init changes",
    ),
    "tensorflow": (
        "import tensorflow as tf\nwith tf.GradientTape() as tape:\n    loss = tf.constant(1.0)\n",
        "trains with TensorFlow, and init changes",
    ),
    "no_torch": ("import numpy as np\nprint(np.ones(3))\n", "does not import torch"),
    "loader_elsewhere": (
        PLAIN.replace("loader = DataLoader(data, batch_size=8, shuffle=True)", "from my_data import loader"),
        r"cannot.py:12: the loop over 'loader' draws from no DataLoader",
    ),
    "no_loader": (
        PLAIN.replace("in loader:", "in [data[i : i + 8] for i in range(0, 64, 8)]:").replace("loader = D", "D"),
        "every rank would train on the same samples",
    ),
    "optimizer_elsewhere": (
        PLAIN.replace("torch.optim.AdamW(model.parameters(), lr=0.01)", "make(model)"),
        "no optimizer is made in this",
    ),
    "one_optimizer_of_two_models": (
        PLAIN.replace("AdamW(model.parameters()", "AdamW([*model.parameters(), *other.parameters()]"),
        "optimizer steps several models: model, other; put them into one torch.nn.ModuleList",
    ),
    "syntax": ("def f(:\n", r"cannot.py:1: "),
}
