"""Trainings as other people write them, each with one fault planted: what `verdict_strangers.py` scores.

A script is a template with places for text (`#: after` and its like, and `{loader}` in a call). A case says what
stands there; its healthy twin has nothing there, or what `healthy` says. The scripts know nothing of the score.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

TABULAR = """
import gc, os, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import farandole as fd

torch.manual_seed(0)
rank = fd.init().rank

class Rows(Dataset):
    def __init__(self, count=16384):
        self.x, self.y = torch.randn(count, 256), torch.randint(0, 10, (count,))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        #: read
        return self.x[index], self.y[index]

rows = Rows()
layers = [nn.Linear(256, 512), nn.ReLU()]
for _ in range(3):
    layers += [nn.Linear(512, 512), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(512, 10))
#: model
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3{optimizer})
model, optimizer = fd.distribute(model, optimizer)
loader = fd.shard(DataLoader(rows, batch_size={batch}, shuffle=True{loader}))
#: before
step = 0
while step < {steps}:
    for x, y in loader:
        #: first
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        #: between
        optimizer.step()
        #: after
        step += 1
        if step >= {steps}:
            break
#: end
print("loss", loss.item())
"""

GPT = """
import os, time
import torch
from torch import nn
from torch.nn import functional as F
import farandole as fd

block, width, heads, depth, vocabulary = 64, 128, 4, 2, 256

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, heads, C // heads).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(depth)), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for layer in self.h:
            h = layer(h)
        return F.cross_entropy(self.lm_head(self.ln_f(h)).flatten(0, 1), y.flatten())

rank = fd.init().rank
fd.seed(1337, per_rank=True)
text = b"".join(open(os.path.join(os.path.dirname(os.__file__), name), "rb").read()
                for name in ("argparse.py", "ast.py", "inspect.py", "typing.py", "tarfile.py"))
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

def get_batch(size=8):
    length = block
    #: length
    starts = torch.randint(len(data) - block - 1, (size,))
    return (torch.stack([data[i:i + length] for i in starts]),
            torch.stack([data[i + 1:i + 1 + length] for i in starts]))

@torch.no_grad()
def estimate_loss(batches=8):
    model.eval()
    total = sum(model(*get_batch()).item() for _ in range(batches))
    model.train()
    return total / batches

model = GPT()
#: model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3{optimizer})
model, optimizer = fd.distribute(model, optimizer)
#: before
for step in range({steps}):
    for micro_step in range({micro}):
        x, y = get_batch()
        #: first
        loss = model(x, y) / {micro}
        loss.backward()
    #: between
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    #: after
#: end
print("loss", loss.item())
"""

GAN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import farandole as fd

torch.manual_seed(0)
fd.init()
generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256))
critic = nn.Sequential(nn.Linear(256, 512), nn.LeakyReLU(0.2), nn.Linear(512, 512), nn.LeakyReLU(0.2),
                       nn.Linear(512, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
generator, of_generator = fd.distribute(generator, of_generator)
critic, of_critic = fd.distribute(critic, of_critic)
loader = fd.shard(DataLoader(TensorDataset(torch.randn(8192, 256)), batch_size=64, shuffle=True))
loss = nn.BCEWithLogitsLoss()
for step, (real,) in enumerate(loader):
    made = generator(torch.randn(len(real), 64))
    of_critic.zero_grad()
    wrong = loss(critic(real), torch.ones(len(real), 1)) + loss(critic(made.detach()), torch.zeros(len(real), 1))
    wrong.backward()
    of_critic.step()
    of_generator.zero_grad()
    loss(critic(made), torch.ones(len(real), 1)).backward()
    of_generator.step()
    if step + 1 >= {steps}:
        break
print("loss", wrong.item())
"""

PICTURES = '''
import io, os, time
import numpy
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
import farandole as fd

torch.manual_seed(0)
fd.init()

class Folder(Dataset):
    """JPEGs, decoded and resized when they are asked for."""
    def __init__(self, count=4096):
        self.files, draw = [], numpy.random.default_rng(0)
        for _ in range(16):
            file = io.BytesIO()
            Image.fromarray(draw.integers(0, 255, (400, 400, 3), dtype=numpy.uint8)).save(file, "JPEG")
            self.files.append(file.getvalue())
        self.count, self.decoded = count, [self.decode(index) for index in range(16)]
    def decode(self, index):
        image = Image.open(io.BytesIO(self.files[index % 16])).convert("RGB").resize((32, 32))
        return torch.from_numpy(numpy.asarray(image).copy()).permute(2, 0, 1).float() / 255
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return {image}, index % 10

model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1),
                      nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = fd.distribute(model, optimizer)
loader = fd.shard(DataLoader(Folder(), batch_size=32, shuffle=True{loader}))
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step + 1 >= {steps}:
        break
print("loss", loss.item())
'''

TRAINER = """
import os, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from farandole.integrations.transformers import FarandoleTrainer

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4))
folder = os.path.dirname(os.__file__)
text = b"".join(open(os.path.join(folder, name), "rb").read() for name in ("argparse.py", "ast.py"))
rows = torch.frombuffer(bytearray(text[:64 * 1024]), dtype=torch.uint8).long().view(-1, 64)[:{samples}]
data = [{"input_ids": row, "labels": row} for row in rows]

class Callback(TrainerCallback):
    def on_step_end(self, arguments, state, control, **kwargs):
        step = state.global_step
        #: after

arguments = TrainingArguments(
    "out", use_cpu=True, per_device_train_batch_size=8, max_steps={steps}, save_strategy="{save}", report_to=[],
    disable_tqdm=True, logging_steps=1000,
)
FarandoleTrainer(model=model, args=arguments, train_dataset=data, callbacks=[Callback()]).train()
"""

DDP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import farandole as fd

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
    nn.Linear(512, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
fd.record(model, optimizer, loader)
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step + 1 >= {steps}:
        break
print("loss", loss.item())
dist.destroy_process_group()
"""

LANGUAGE_MODEL = "examples/language_model.py"
"""README's own example; taken as it is."""


@dataclass(frozen=True)
class Stranger:
    """A training, its fault, and what must be found."""

    name: str
    script: str
    """One of the templates, or a file of the repository."""
    kinds: tuple[str, ...]
    """Any of these is right; none: a healthy run."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Text by place: the fault."""
    healthy: Mapping[str, str] | None = field(default_factory=dict)
    """Text by place without it. None: nothing tells what it would be, and the price is not scored."""
    command: str = "run -np 2"
    healthy_command: str = ""
    """Where the fault is in the command; else the same."""
    arguments: str = ""
    """Of the script."""
    ranks: tuple[int, ...] = ()
    steps: int = 60
    burner: bool = False
    """Whether another program takes the core of rank 1."""
    paste_at: str = ""
    """The line of the script that a pasted replacement takes the place of."""

    def text(self, places: Mapping[str, str]) -> str:
        """Return the script with texts at its places."""
        lines = []
        for line in self.script.splitlines():
            bare = line.lstrip()
            if bare.startswith("#: "):
                inserted = textwrap.dedent(places.get(bare[3:], "pass" if bare[3:] in _NEEDED else "")).strip()
                lines.append(textwrap.indent(inserted, line[: len(line) - len(bare)]))
            else:
                lines.append(line)
        text = "\n".join(lines)
        for place, words in {**_USUAL, "steps": str(self.steps), **places}.items():
            text = text.replace(f"{{{place}}}", words)
        return text


_NEEDED = ("after",)
"""Places that may not be empty, because they are a function's only line in one of the scripts."""
_USUAL = {
    "optimizer": "", "loader": "", "batch": "64", "micro": "1", "image": "self.decoded[index % 16]", "save": "no",
    "samples": "512",
}  # fmt: skip
_HOG = """
def collect_metrics():
    while True:
        sum(i * i for i in range(3000))
if rank == 1:
    threading.Thread(target=collect_metrics, daemon=True).start()
"""
_HISTOGRAMS = """
with open(f"histograms{rank}.txt", "a") as file:
    for name, parameter in model.named_parameters():
        file.write(f"{name} {torch.histc(parameter.grad, 100).tolist()}\\n")
        file.flush()
        os.fsync(file.fileno())
"""
_STOPPED = """
if rank == 1:
    import signal, subprocess
    subprocess.Popen([sys.executable, "-c", f'''
import os, signal, time
while os.getppid() == {os.getpid()}:
    os.kill({os.getpid()}, signal.SIGSTOP); time.sleep(0.012)
    os.kill({os.getpid()}, signal.SIGCONT); time.sleep(0.012)
'''])
"""
_EVALUATION = """
if step % 10 == 9:
    model.eval()
    with torch.no_grad():
        for _ in range(60):
            model(x)
    model.train()
"""
_SMALL_LAYERS = """
class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(256, 16), nn.Linear(16, 10)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(200))
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)
model = Many()
"""
_SAVE = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"saved{rank}.pt")'
_SLOW_HOST = '--rate 1gbit --script "0s:1=100mbit"'
STRANGERS = (
    Stranger("healthy table", TABULAR, ()),
    Stranger("torch.save in each step", TABULAR, ("pause",), {"after": _SAVE}, paste_at=_SAVE),
    Stranger("histograms written with fsync", TABULAR, ("other",), {"between": _HISTOGRAMS}),
    Stranger("a thread holds the GIL of rank 1", TABULAR, ("straggler",), {"before": _HOG}, ranks=(1,)),
    Stranger("batches of 2", TABULAR, ("small-batch", "optimizer"), {"batch": "2"}, None),
    Stranger("more work on rank 1", TABULAR, ("straggler",), ranks=(1,), places={
        "first": "if rank == 1:\n    for _ in range(12): torch.mm(layers[2].weight, layers[2].weight)"}),
    Stranger("a slow disk and one worker", TABULAR, ("input",), {
        "read": "time.sleep(0.002)", "loader": ", num_workers=1"}, {"loader": ", num_workers=1"}),
    Stranger("1 ms of CPU a sample", TABULAR, ("input",), {
        "read": "end = time.process_time() + 0.001\nwhile time.process_time() < end: pass"}),
    Stranger("gc.collect in each step", TABULAR, ("gc",), {
        "before": "junk = [{'a': [i]} for i in range(300_000)]", "after": "gc.collect()"},
        {"before": "junk = [{'a': [i]} for i in range(300_000)]"}),
    Stranger("evaluation each 10 steps, unmarked", TABULAR, ("pause",), {"after": _EVALUATION}),
    Stranger("404 small parameters one by one", TABULAR, ("optimizer",), {
        "model": _SMALL_LAYERS, "optimizer": ", foreach=False"},
        {"model": _SMALL_LAYERS, "optimizer": ", fused=True"}),
    Stranger("8 threads on a core", TABULAR, ("threads", "oversubscribed"), {
        "before": "torch.set_num_threads(8)"}),
    Stranger("4 ranks on 2 cores", TABULAR, ("crowded",), command="run -np 4", healthy_command="run -np 2"),
    Stranger("both ranks on one core", TABULAR, ("crowded",), {
        "before": "os.sched_setaffinity(0, {min(os.sched_getaffinity(os.getppid()))})"}),
    Stranger("rank 1 stopped half of the time", TABULAR, ("straggler",), {"before": _STOPPED}, ranks=(1,)),
    Stranger("accumulation without saying so", GPT, ("extra-exchange",), {"micro": "4"}, {"micro": "4"},
             "emulate --hosts 2 --rate 200mbit", "emulate --hosts 2 --rate 200mbit --set accumulate=4"),
    Stranger("50 Mbit/s between two hosts", TABULAR, ("communication",), steps=25,
             command="emulate --hosts 2 --rate 50mbit", healthy_command="emulate --hosts 2 --rate 10gbit"),
    Stranger("one of 3 hosts slow", TABULAR, ("slow-link",), steps=25,
             command=f"emulate --hosts 3 {_SLOW_HOST}", healthy_command="emulate --hosts 3 --rate 1gbit"),
    Stranger("one of 4 hosts slow", TABULAR, ("slow-link",), steps=25,
             command=f"emulate --hosts 4 {_SLOW_HOST}", healthy_command="emulate --hosts 4 --rate 1gbit"),
    Stranger("README's example", LANGUAGE_MODEL, ("slow-link",), arguments="--steps 30",
             command=f"emulate --hosts 3 {_SLOW_HOST}", healthy_command="emulate --hosts 3 --rate 1gbit"),
    Stranger("the Trainer saves each epoch", TRAINER, ("pause",), {"save": "epoch", "samples": "32"},
             {"samples": "32"}, steps=150),
    # Ten and more that are new.
    Stranger("healthy GPT", GPT, ()),
    Stranger("a GAN at 100 Mbit/s", GAN, ("communication", "extra-exchange"), steps=25,
             command="emulate --hosts 2 --rate 100mbit", healthy_command="emulate --hosts 2 --rate 10gbit"),
    Stranger("DDP at 100 Mbit/s, recorded", DDP, ("communication",), steps=25,
             command="emulate --hosts 2 --rate 100mbit", healthy_command="emulate --hosts 2 --rate 10gbit"),
    Stranger("a GPT at 50 Mbit/s", GPT, ("communication",), steps=25,
             command="emulate --hosts 2 --rate 50mbit", healthy_command="emulate --hosts 2 --rate 10gbit"),
    Stranger("texts of unequal length", GPT, ("samples", "jitter"), {
        "length": "length = int(torch.randint(8, block + 1, ()))"}, None, steps=100),
    Stranger("workers that start anew each epoch", TABULAR, ("irregular", "pause"), {
        "loader": ", num_workers=1", "read": "time.sleep(0.00005)", "model": "rows = Rows(1024)"}, {
        "loader": ", num_workers=1, persistent_workers=True", "read": "time.sleep(0.00005)",
        "model": "rows = Rows(1024)"}),
    Stranger("statistics on rank 0", TABULAR, ("straggler",), ranks=(0,), places={
        "after": "if rank == 0: torch.linalg.svdvals(layers[2].weight)"}),
    Stranger("rank 0 evaluates alone", GPT, ("pause",), ranks=(0,), places={
        "after": "if rank == 0 and step % 10 == 9: estimate_loss(20)"}),
    Stranger("JPEGs decoded in the loop", PICTURES, ("input",), {"image": "self.decode(index)"}),
    Stranger("a slow disk on rank 1", TABULAR, ("straggler", "input"), ranks=(1,), places={
        "read": "if rank == 1: time.sleep(0.0005)"}),
    Stranger("a bucket for each of 404 parameters", TABULAR, ("small-buckets",), {"model": _SMALL_LAYERS},
             {"model": _SMALL_LAYERS},
             "emulate --hosts 2 --rate 1gbit --set bucket_bytes=1 --set first_bucket_bytes=1",
             "emulate --hosts 2 --rate 1gbit"),
    Stranger("a slow start", GPT, ("warm-up",), {"after": "if step < 3: time.sleep(1.0)"}, None),
    Stranger("another program on a core", TABULAR, ("oversubscribed",), ranks=(1,), burner=True),
    Stranger("a callback that sleeps", TRAINER, ("other", "pause"), {"after": "time.sleep(0.03)"}),
    Stranger("a checkpoint on one rank each 10 steps", GPT, ("pause",), ranks=(0,), places={
        "after": "if rank == 0 and step % 10 == 9:\n"
                 "    torch.save({'model': model.state_dict(), 'ema': torch.zeros(25_000_000)}, 'ckpt.pt')"},
        paste_at="if rank == 0 and step % 10 == 9:\n"
                 "        torch.save({'model': model.state_dict(), 'ema': torch.zeros(25_000_000)}, 'ckpt.pt')"),
)  # fmt: skip
"""Of the first 21 each is one of an hour with other people's trainings; those without kinds are healthy."""
