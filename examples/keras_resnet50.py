"""A typical Horovod script for Keras: ResNet-50 with `fit`, warm-up, checkpoints. Only one import is Farandole's.

    farandole run -np 2 -- python keras_resnet50.py --train-dir images/train --val-dir images/val --generate 256

A directory has one directory of images for each class. ``--generate N`` first makes that many for training, and a
quarter for validation: noisy stripes, whose direction and color are those of the class, so that accuracy means
something. The learning rate is scaled by the number of ranks and warmed up (Goyal et al., "Accurate, large
minibatch SGD", 2017).
"""

import argparse
import importlib.util
import math
import time
from pathlib import Path

import keras
import tensorflow as tf

import farandole.horovod.tensorflow.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--train-dir", type=Path, required=True, help="training images")
parser.add_argument("--val-dir", type=Path, required=True, help="validation images")
parser.add_argument("--generate", type=int, default=0, metavar="N", help="images to make where there are none")
parser.add_argument("--image-size", type=int, default=224, help="pixels of a side")
parser.add_argument("--classes", type=int, default=10, help="of generated images")
parser.add_argument("--model", choices=["resnet50", "tiny"], default="resnet50", help="tiny: for a first try")
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.keras")
parser.add_argument("--log-dir", help="directory for TensorBoard")
parser.add_argument("--batch-size", type=int, default=32, help="images of a rank in a step")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--base-lr", type=float, default=0.0125, help="learning rate of one rank")
parser.add_argument("--warmup-epochs", type=int, default=5)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005, help="weight decay")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--compression", default="none", help="none, fp16, or a codec: int8, int4")
parser.add_argument("--no-exchange", action="store_true", help="each rank trains alone: what communication costs")
args = parser.parse_args()


def generate(directory, count, seed):
    """Make `count` images: stripes with noise."""
    draw = tf.random.Generator.from_seed(seed)
    axis = tf.linspace(0.0, 1.0, args.image_size)
    x, y = tf.meshgrid(axis, axis)
    for i in range(count):
        label = i % args.classes
        angle = math.pi * label / args.classes
        waves = tf.sin(25.0 * (x * math.cos(angle) + y * math.sin(angle)) + draw.uniform([]) * 6.0)
        color = [0.5 + 0.5 * math.cos(2 * math.pi * (label / args.classes + part / 3)) for part in range(3)]
        image = 0.5 + 0.25 * waves[..., None] * tf.constant(color) + draw.normal([*x.shape, 3], stddev=0.1)
        path = directory / f"class-{label:03d}" / f"{i:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        tf.io.write_file(str(path), tf.io.encode_png(tf.cast(255 * tf.clip_by_value(image, 0, 1), tf.uint8)))


def images(directory, shuffle):
    """Return this rank's batches of a directory, as many as the other ranks have."""
    # The seed makes the order the same on all ranks, which then take every hvd.size()-th image.
    dataset = keras.utils.image_dataset_from_directory(
        directory, image_size=(args.image_size, args.image_size), batch_size=None, shuffle=shuffle, seed=args.seed,
        verbose=False,
    )  # fmt: skip
    steps = len(dataset.file_paths) // (args.batch_size * hvd.size())
    if steps == 0:
        raise SystemExit(f"{directory}: {len(dataset.file_paths)} images are no batch of {hvd.size()} ranks")
    classes = len(dataset.class_names)
    batches = dataset.shard(hvd.size(), hvd.rank()).batch(args.batch_size).take(steps)
    prepare = keras.applications.resnet50.preprocess_input if args.model == "resnet50" else lambda x: x / 127.5 - 1
    return batches.map(lambda x, y: (prepare(x), y)).prefetch(tf.data.AUTOTUNE), steps, classes


def make_model(classes):
    shape = (args.image_size, args.image_size, 3)
    if args.model == "resnet50":
        return keras.applications.ResNet50(weights=None, input_shape=shape, classes=classes)
    return keras.Sequential(
        [
            keras.layers.Input(shape),
            keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(classes, activation="softmax"),
        ]
    )


class Clock(keras.callbacks.Callback):
    """Seconds of each epoch's training, without its validation."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.end = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self.end - self.begin)


begin = time.perf_counter()
hvd.init()
# The same on all ranks: tf.data adds this seed to that of a shuffle, and ranks with another order lose images.
keras.utils.set_random_seed(args.seed)
if args.generate and hvd.local_rank() == 0:
    for directory, count, seed in (
        (args.train_dir, args.generate, args.seed), (args.val_dir, args.generate // 4, args.seed + 1)
    ):  # fmt: skip
        if not directory.exists():
            generate(directory, count, seed)
hvd.allreduce(0.0, name="images_are_there")  # the other ranks wait

train_images, steps, classes = images(args.train_dir, shuffle=True)
val_images, _, _ = images(args.val_dir, shuffle=False)
model = make_model(classes)
rate = args.base_lr * hvd.size()
optimizer = keras.optimizers.SGD(rate, momentum=args.momentum, weight_decay=args.wd or None)
if not args.no_exchange:
    optimizer = hvd.DistributedOptimizer(optimizer, compression=getattr(hvd.Compression, args.compression))
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

# Rank 0 knows what was saved; the broadcast below gives all ranks what it loads.
done = 0
if hvd.rank() == 0:
    saved = [
        epoch for epoch in range(1, args.epochs + 1) if Path(args.checkpoint_format.format(epoch=epoch)).exists()
    ]
    done = max(saved, default=0)
done = int(hvd.broadcast(done, root_rank=0, name="resume_from_epoch"))
if done and hvd.rank() == 0:
    print(f"Resuming after epoch {done}", flush=True)
    loaded = keras.models.load_model(args.checkpoint_format.format(epoch=done))
    model.set_weights(loaded.get_weights())
    optimizer.build(model.trainable_variables)
    for mine, theirs in zip(optimizer.variables, loaded.optimizer.variables, strict=True):
        mine.assign(theirs)

clock = Clock()
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    clock,
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateScheduleCallback(rate, lambda epoch: 0.1 if epoch < 60 else 0.01, start_epoch=30),
]
if args.warmup_epochs:
    callbacks.insert(
        3, hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=args.warmup_epochs, verbose=1)
    )
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))
    if args.log_dir and importlib.util.find_spec("tensorboard") is None:
        print(
            "TensorBoard is not installed (pip install tensorboard): nothing is written to --log-dir", flush=True
        )
    elif args.log_dir:
        callbacks.append(keras.callbacks.TensorBoard(args.log_dir))

history = model.fit(
    train_images,
    epochs=args.epochs,
    initial_epoch=done,
    validation_data=val_images,
    callbacks=callbacks,
    shuffle=False,
    verbose=0,
).history
if hvd.rank() == 0 and clock.epochs:
    for i, seconds in enumerate(clock.epochs):
        print(
            f"Epoch {done + i + 1}: {seconds:.2f} s, loss {history['loss'][i]:.5f}, "
            f"accuracy {history['accuracy'][i]:.4f}, validation loss {history['val_loss'][i]:.5f}, "
            f"accuracy {history['val_accuracy'][i]:.4f}"
        )
    # The first epoch includes the making of the graph.
    seconds = sorted(clock.epochs[1:] or clock.epochs)[len(clock.epochs[1:]) // 2]
    print(f"Time of an epoch: {seconds:.2f} s")
    print(f"Images a second: {steps * args.batch_size * hvd.size() / seconds:.1f}")
    print(f"Total: {time.perf_counter() - begin:.1f} s")
    print(f"Validation accuracy: {history['val_accuracy'][-1]:.4f}", flush=True)
