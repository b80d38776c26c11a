"""Scripts as guides for Horovod print them, mistakes and all: they run, or one line says what to change."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.ranks.keras_jobs import environment, needs_tensorflow, needs_tf_keras
from tests.ranks.pool import patient

RESNET = """
import tensorflow as tf
import horovod.tensorflow as hvd
from tensorflow.keras.applications import ResNet50
from tensorflow.keras.preprocessing.image import ImageDataGenerator

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

batch_size = 4
datagen = ImageDataGenerator(rescale=1.0 / 255)
train_generator = datagen.flow_from_directory(
    "images", target_size=(32, 32), batch_size=batch_size, class_mode="categorical"
)
train_generator.samples = train_generator.samples // hvd.size()

model = ResNet50(weights=None, input_shape=(32, 32, 3), classes=2)
opt = tf.keras.optimizers.SGD(learning_rate=0.01 * hvd.size(), momentum=0.9)
opt = hvd.DistributedOptimizer(opt, gradient_predivide_factor=1.0)
model.compile(optimizer=opt, loss="categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=5, verbose=1),
    tf.keras.callbacks.ModelCheckpoint(
        "./resnet50_{epoch}.h5", save_weights_only=True, verbose=1 if hvd.rank() == 0 else 0
    ),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.TensorBoard(log_dir="./logs"))

model.fit(
    train_generator,
    steps_per_epoch=train_generator.samples // batch_size,
    epochs=2,
    verbose=1 if hvd.rank() == 0 else 0,
    callbacks=callbacks,
)
print("rank", hvd.rank(), "trained to", round(float(model.optimizer.learning_rate), 4))
"""
DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="nccl")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4)).sum().backward()
print("rank", dist.get_rank(), "has", model.module.weight.grad[0, 0].item())
"""
TORCH = """
import torch
import torch.nn.functional as F
import torch.utils.data
import horovod.torch as hvd

hvd.init()
SELECT
torch.manual_seed(42 + hvd.rank())
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
sampler = hvd.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
print("same", len(set(hvd.allgather_object(model[0].weight.sum().item()))))
"""


def images(folder: Path) -> None:
    from PIL import Image

    draw = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")


def run(folder: Path, *line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    told = environment(folder, **variables)
    return subprocess.run(line, cwd=folder, env=told, capture_output=True, text=True, timeout=200, check=False)


def start(folder: Path, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    launcher = [sys.executable, "-m", "farandole", "run", "-np", "2", *words, "--"]
    return run(folder, *launcher, sys.executable, "train.py", **variables)


@pytest.mark.full("slow")
@needs_tensorflow
@needs_tf_keras
@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="ImageDataGenerator of tf_keras needs scipy")
@pytest.mark.timeout(300)
def test_a_guides_resnet_runs_as_it_is_printed(tmp_path: Path) -> None:
    images(tmp_path)
    done = start(tmp_path, RESNET, "--as-horovod", TF_USE_LEGACY_KERAS="1")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "rank 0 trained to 0.014" in said, "two fifths of the way from 0.01 to 0.02"
    assert "rank 1 trained to 0.014" in said
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == ["resnet50_1.h5", "resnet50_2.h5"]
    assert said.count("rank 0 alone writes ./resnet50_{epoch}.h5") == 1
    assert said.count("every rank reads all 16 images of images") == 1


@pytest.mark.full("slow")
@needs_tensorflow
@pytest.mark.timeout(300)
def test_keras_3_is_told_the_names_it_wants_and_then_trains(tmp_path: Path) -> None:
    images(tmp_path)
    script = RESNET.replace("ResNet50(", "tf.keras.applications.MobileNetV2(")
    refused = start(tmp_path, script, "--as-horovod")
    assert refused.returncode == 1
    assert 'a name for Keras 3 is "./resnet50_{epoch}.weights.h5" with save_weights_only=True' in refused.stderr
    assert "pip install --no-deps tf_keras, and start it with TF_USE_LEGACY_KERAS=1" in refused.stderr
    # And what the warning says of the folder that every rank reads whole.
    divided = script.replace('"./resnet50_{epoch}.h5"', '"./resnet50_{epoch}.weights.h5"').replace(
        "train_generator.samples = train_generator.samples // hvd.size()",
        "import farandole.keras\ntrain_generator = farandole.keras.shard(train_generator)",
    )
    divided = divided.replace('class_mode="categorical"', 'class_mode="categorical", seed=1')
    divided = divided.replace("    steps_per_epoch=train_generator.samples // batch_size,\n", "")
    done = start(tmp_path, divided, "--as-horovod")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "rank 1 trained to 0.014" in said
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == [
        "resnet50_1.weights.h5",
        "resnet50_2.weights.h5",
    ]
    assert "every rank reads all" not in said


@pytest.mark.full("slow")
@patient
def test_a_guides_torch_script(tmp_path: Path) -> None:
    done = start(tmp_path, TORCH.replace("SELECT", ""), "--as-horovod")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same 1") == 2
    done = start(tmp_path, TORCH.replace("SELECT", "torch.cuda.set_device(hvd.local_rank())"), "--as-horovod")
    assert done.returncode == 1
    assert "torch sees no GPU here: put if torch.cuda.is_available(): before torch.cuda.set_device" in done.stderr


@pytest.mark.full("slow")
@patient
def test_ddp_with_nccl_where_there_is_no_gpu(tmp_path: Path) -> None:
    done = start(tmp_path, DDP)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert (
        'write "gloo" where the script says "nccl", or leave that and start with farandole run --backend' in said
    )
    assert "where the script names the GPU, put if torch.cuda.is_available(): before torch.cuda.set_device" in said
    assert "instead of .cuda()" in said
    done = start(tmp_path, DDP, "--backend", "farandole")
    assert done.returncode == 0, done.stderr
    assert "rank 0 has 3.0" in done.stdout
    assert "rank 1 has 3.0" in done.stdout


@patient
def test_commands_of_guides(tmp_path: Path) -> None:
    horovodrun = Path(sys.executable).with_name("horovodrun")
    text = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['HOROVOD_RANK'])"
    words = ["-np", "1", "--mpi-launch-flag", "env CUDA_VISIBLE_DEVICES=0", "python", "-c", text]
    done = run(tmp_path, str(horovodrun), *words)
    assert done.returncode == 0, done.stderr
    assert "0 0" in done.stdout
    done = run(tmp_path, str(horovodrun), "-np", "2", "python", "horovod/test/common_test.py", "-v")
    assert done.returncode == 2
    assert "to check that ranks can train together: farandole test" in done.stderr
