"""The benchmarks of ``farandole bench suite``, as the commands a user would type."""

from __future__ import annotations

from dataclasses import dataclass

RATE = "{rate}"


@dataclass(frozen=True)
class Entry:
    """One benchmark: a heading, the words after ``farandole bench``."""

    title: str
    words: tuple[str, ...]

    def command(self, rate: str) -> list[str]:
        """Return the words, with the rate in them."""
        return [word.replace(RATE, rate) for word in self.words]

    def emulates(self, rate: str) -> bool:
        """Return whether it runs on emulated hosts at this rate."""
        return RATE in self.words and rate != "none"


_ON_HOSTS = ("--hosts", "2", "--rate", RATE)
_ON_ONE = ("--hosts", "1", "--slots", "2", "--rate", "none")
_CONTENDERS = ("--contenders", "ddp;none;bf16;int8")

SUITES = {
    "standard": (
        Entry(
            "Collectives across hosts", ("collectives", *_ON_HOSTS, "--operations", "all_reduce,reduce_scatter")
        ),
        Entry("Collectives in one host", ("collectives", *_ON_ONE, "--routes", "gloo,segments,shared")),
        Entry("Codecs", ("codecs",)),
        Entry("ResNet-50", ("step", *_ON_HOSTS, *_CONTENDERS, "--model", "resnet50", "--batch", "2")),
        Entry("Language model of 27 million parameters", ("step", *_ON_HOSTS, *_CONTENDERS, "--model", "lm27")),
        Entry("Perceptron", ("step", *_ON_HOSTS, *_CONTENDERS, "--model", "mlp", "--batch", "32")),
        Entry("CIFAR CNN", ("step", *_ON_HOSTS, *_CONTENDERS, "--model", "cifar-cnn", "--batch", "32")),
    ),
    "quick": (
        Entry("Collectives", ("collectives", *_ON_HOSTS, "--sizes", "64KiB", "--rounds", "3")),
        Entry("Perceptron", ("step", *_ON_HOSTS, "--contenders", "ddp;none", "--model", "mlp", "--rounds", "3")),
    ),
}
"""``vgg16``, ``bert`` and ``gpt`` are left to ``bench step``: on two cores a step of them takes many seconds."""
