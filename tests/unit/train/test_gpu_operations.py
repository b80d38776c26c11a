"""Operations that a GPU runs otherwise, counted on a machine without one, and only while they are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from farandole.comm.device.accelerator import gpu_count
from farandole.train.analysis import fake_pass
from farandole.train.analysis.fake_pass import IN_FP32, LiveStorages, fake_mode, make_fake, operations_of, run_pass

SAMPLES, HEADS, TOKENS, SIZE = 2, 4, 32, 16
WIDTH = HEADS * SIZE
IN_16_BITS = {
    "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
    "addmv", "addr", "chain_matmul", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum",
    "gru_cell", "linalg_multi_dot", "lstm_cell", "mv", "rnn_relu_cell", "rnn_tanh_cell",
}  # fmt: skip
"""What autocast computes in 16 bits on a GPU alone: made of products that it does so everywhere, or recurrent."""
IN_THE_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot",
}  # fmt: skip
RESIZED = {
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
}  # fmt: skip


def test_the_table_is_torchs_own() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    only = {name[6:] for name in names if has(name, "AutocastCUDA") and not has(name, "AutocastCPU")}
    assert only - IN_16_BITS - IN_THE_WIDEST - RESIZED == set(IN_FP32)


class Attention(nn.Module):
    """Attention over its input and dropout."""

    def __init__(self, inside: float, after: float) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.inside, self.after = inside, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.heads(x).view(SAMPLES, TOKENS, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        query, key, value = made.unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.inside, is_causal=True)
        return functional.dropout(seen, self.after)


def saved_bytes(make: Callable[[], nn.Module], device: str, precision: str = "fp32") -> int:
    """Return what a pass keeps until backward, beside its input."""
    with fake_mode(), operations_of(device):
        model = make()
        make_fake(model, "cpu", None)
        batch = torch.empty(SAMPLES, TOKENS, WIDTH)
        return run_pass(model, batch, None, device="cpu", precision=precision).saved_bytes - batch.nbytes


def test_attention_with_dropout_is_one_kernel_and_a_mask_one_byte_an_element() -> None:
    elements = SAMPLES * TOKENS * WIDTH
    scores = SAMPLES * HEADS * TOKENS * TOKENS
    none = saved_bytes(lambda: Attention(0.0, 0.0), "cuda")
    assert none == saved_bytes(lambda: Attention(0.0, 0.0), "cpu"), "nothing is otherwise without dropout"
    assert saved_bytes(lambda: Attention(0.1, 0.0), "cuda") == none, "the kernel of no dropout"
    assert saved_bytes(lambda: Attention(0.1, 0.0), "cpu") > none + 4 * scores, "matrices of scores"
    # What is dropped is a new tensor, and its product is not saved.
    masked = saved_bytes(lambda: Attention(0.0, 0.1), "cuda") - none
    assert saved_bytes(lambda: Attention(0.0, 0.1), "cpu") - none == masked + 3 * elements, "4 bytes, or 1"


def test_norms_by_squares_keep_their_input_and_a_number_of_each_row() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    elements, rows = SAMPLES * TOKENS * WIDTH, SAMPLES * TOKENS
    alone = saved_bytes(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), "cuda")
    # The stand-in also has a mean of each row, which a GPU's kernel does not keep.
    assert saved_bytes(make, "cuda") == alone + 4 * (elements + 2 * rows), "given and normed, for given alone"
    assert saved_bytes(make, "cpu") == saved_bytes(make, "cuda") + 4 * (elements - rows), "and what is scaled"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_computes_more_in_fp32_on_a_gpu(device: str) -> None:
    wide = torch.float32 if device == "cuda" else torch.bfloat16
    with operations_of(device), torch.autocast("cpu", torch.bfloat16):
        x = functional.linear(torch.ones(4, 8), torch.ones(8, 8))
        assert x.dtype == torch.bfloat16
        for made in (x**2, x.exp(), x.sum(), x.softmax(-1), x.log_softmax(dim=-1), functional.layer_norm(x, [8])):
            assert made.dtype == wide
        assert x.softmax(-1, dtype=torch.bfloat16).dtype == torch.bfloat16, "as it is asked for"
        assert functional.gelu(x).dtype == (x + x).dtype == torch.bfloat16, "in the type of the input on both"
        assert functional.rms_norm(x, [8]).dtype == wide
        assert functional.linear(x**2, torch.ones(8, 8)).dtype == torch.bfloat16, "autocast goes on"
    assert (x**2).dtype == torch.bfloat16


def test_a_sum_in_float32_copies_nothing() -> None:
    with operations_of("cuda"), torch.autocast("cpu", torch.bfloat16):
        x = functional.linear(torch.ones(64, 64), torch.ones(64, 64, requires_grad=True))
        live = LiveStorages([x])
        with live:
            made = (x.sum(), x.sum(0), x.softmax(-1), torch.softmax(x, -1, None), x.cumsum(0))
        assert {each.dtype for each in made} == {torch.float32}
        assert live.peak_bytes == sum(each.nbytes for each in made), "no float32 copy of the input"
        ids = torch.ones(4, 4, dtype=torch.int64)
        assert ids.sum().dtype == torch.int64, "numbers that are no floats are left alone"


def test_attention_of_other_shapes_is_products_on_a_gpu_too() -> None:
    """Without heads as a dimension of their own no kernel takes it: with dropout a mask of all scores is kept."""

    def kept(dropout: float) -> int:
        with operations_of("cuda"):
            x = torch.ones(SAMPLES, TOKENS, WIDTH, requires_grad=True)
            live = LiveStorages([x])
            with live:
                made = functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)
            assert made.requires_grad
            return live.live_bytes

    assert kept(0.1) >= kept(0.0) + SAMPLES * TOKENS * TOKENS


def test_norms_of_equal_numbers_are_numbers() -> None:
    with operations_of("cuda"):
        assert functional.rms_norm(torch.ones(2, 8), [8]).isfinite().all()


def test_a_second_time_inside_changes_nothing(recwarn: pytest.WarningsRecorder) -> None:
    with operations_of("cuda"):
        with operations_of("cuda"):
            assert not is_usual()
        assert not is_usual()
    assert is_usual()
    assert not recwarn.list


def is_usual() -> bool:
    x = torch.randn(64, 64)
    ones = torch.ones(1, 1, 8, 8)
    attended = functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5)
    normed = functional.rms_norm(x + 1, [64])
    with torch.autocast("cpu", torch.bfloat16):
        short = (torch.ones(2, 2) @ torch.ones(2, 2)).exp().dtype
    return bool((attended != 1).any()) and float(normed.mean()) > 0.3 and short == torch.bfloat16


def test_other_threads_and_what_comes_after_train_as_before() -> None:
    found: list[bool] = []
    with operations_of("cuda"):
        other = threading.Thread(target=lambda: found.append(is_usual()))
        other.start()
        other.join()
        assert not is_usual(), "here the forms of a GPU are seen"
    with pytest.raises(ZeroDivisionError), operations_of("cuda"):
        raise ZeroDivisionError
    assert found == [True]
    assert is_usual()


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_count(), reason="compares with a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_keeps_as_much(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_pass, "gpu_count", lambda: 0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(0.1, 0.1)
            self.last, self.widen, self.narrow = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4096), nn.Linear(4096, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.norm(x)).transpose(1, 2).flatten(2)
            wide: torch.Tensor = self.widen(self.last(x))
            narrow: torch.Tensor = self.narrow(0.5 * wide * (1 + torch.tanh(wide + 0.04 * torch.pow(wide, 3.0))))
            return x + narrow

    model, batch = Block().cuda(), torch.ones(SAMPLES, TOKENS, WIDTH, device="cuda")
    live = LiveStorages(model.parameters(), copied=model.parameters())
    with live, torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        kept = model(batch).sum()
    assert kept.requires_grad
    assert saved_bytes(Block, "cuda", precision) == pytest.approx(live.live_bytes, rel=0.02)
