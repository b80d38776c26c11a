"""The models to measure with have the shapes and sizes that their names promise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farandole.bench.models import Bert, LanguageModel, SmallCNN, resnet50, vgg16
from farandole.bench.step import MODELS
from farandole.bench.step_worker import WORKS, parameters_of


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_resnet50() -> None:
    model = resnet50()
    assert count(model) == 25_557_032
    assert len(list(model.parameters())) == 161
    assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_small_cnn() -> None:
    model = SmallCNN(in_channels=3, image_size=32)
    convolutions = [m for m in model if isinstance(m, nn.Conv2d)]
    linears = [m for m in model if isinstance(m, nn.Linear)]
    assert [(c.in_channels, c.out_channels, c.kernel_size) for c in convolutions] == [
        (3, 16, (3, 3)),
        (16, 32, (3, 3)),
    ]
    assert [(x.in_features, x.out_features) for x in linears] == [(2048, 128), (128, 10)]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert SmallCNN()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_language_model_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = LanguageModel(width=32, depth=2, heads=4, context=16).eval()
    assert model.output.weight is model.token.weight
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    one, two = model(tokens), model(changed)
    assert one.shape == (1, 16, 256)
    assert torch.equal(one[:, :10], two[:, :10])
    assert not torch.equal(one[:, 10:], two[:, 10:])


def test_language_model_size() -> None:
    model = LanguageModel()
    embeddings, block = (256 + 64) * 64, 12 * 64 * 64 + 13 * 64
    assert count(model) == embeddings + 2 * block + 2 * 64, "the output has no weights of its own"
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 256)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet50", 25_557_032),
        ("vgg16", 138_357_544),
        ("bert", 110_106_428),
        ("gpt", 124_439_808),
        ("lm27", 27_382_784),
        ("small", 433_664),
        ("cifar-cnn", 268_650),
        ("mlp", 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10),
    ],
)
def test_works_have_the_parameters_of_their_names(name: str, parameters: int) -> None:
    assert parameters_of(name) == parameters
    assert set(WORKS) == set(MODELS)


def test_berts_encoder_has_the_known_size_without_its_heads() -> None:
    transform, norm, follows = 768 * 768 + 768, 2 * 768, 2 * 768 + 2
    assert parameters_of("bert") - (transform + norm + follows + 30_522) == 109_482_240


@pytest.mark.parametrize("name", ["small", "cifar-cnn", "mlp"])
def test_works_train(name: str) -> None:
    torch.manual_seed(0)
    work = WORKS[name]
    model, batch = work.make(), work.make_batch(4, torch.Generator().manual_seed(0))
    losses = []
    for _ in range(5):
        loss = work.loss(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_bert_guesses_only_what_is_masked() -> None:
    tokens, sentences, wanted, following = WORKS["bert"].make_batch(8, torch.Generator().manual_seed(0))
    assert tokens.shape == sentences.shape == wanted.shape == (8, 128)
    assert following.shape == (8,)
    assert torch.equal(tokens == 103, wanted != -100)
    share = float((wanted != -100).float().mean())
    assert 0.1 < share < 0.2
    model = Bert(width=16, depth=1, heads=2, context=128, vocabulary=30_522).eval()
    loss = nn.functional.cross_entropy(model(tokens, sentences)[0].flatten(0, 1), wanted.flatten())
    total = WORKS["bert"].loss(model, (tokens, sentences, wanted, following))
    assert total.item() > loss.item()


def test_vgg16_takes_its_images() -> None:
    assert vgg16(10).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10), "pooled to 7 x 7 whatever the image"
