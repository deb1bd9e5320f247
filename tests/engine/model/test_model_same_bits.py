"""A row's hidden state and logits have the same bits in every batch, at every place in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_reference import CausalAttention, RowwiseAttention, load, save_random, threads

from engine.model.decoder import Decoder
from engine.model.layers import Linear, RmsNorm, RowStability, cancelling
from engine.model.library import ModelFiles

DTYPES = [torch.bfloat16, torch.float32]
BATCHES = (1, 2, 3, 7, 8, 33, 100, 512)


@pytest.fixture(autouse=True)
def _two_threads() -> object:
    with threads(2):
        yield


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def smollm2(request: pytest.FixtureRequest, smollm2_files: ModelFiles) -> Decoder:
    with threads(2):
        return load(smollm2_files, request.param)


def test_smollm2_rows_keep_their_bits_in_every_batch(smollm2: Decoder) -> None:
    assert smollm2.weights.stable
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, smollm2.config.vocab_size, (512,), generator=random)
    positions = torch.randint(0, smollm2.config.max_position, (512,), generator=random)
    whole = smollm2.forward(ids, positions, RowwiseAttention())
    for n in BATCHES:
        for at in {0, 5, 512 - n} if n + 5 <= 512 else {0}:
            rows = slice(at, at + n)
            part = smollm2.forward(ids[rows], positions[rows], RowwiseAttention())
            assert torch.equal(part, whole[rows]), f"{n} rows from {at}"


def test_smollm2_logits_keep_their_bits_in_every_batch(smollm2: Decoder) -> None:
    hidden = torch.randn(33, smollm2.config.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(smollm2.weights.dtype)
    whole = smollm2.logits(hidden)
    for n in (1, 2, 3, 7, 8, 16):
        for at in (0, 5, 33 - n):
            assert torch.equal(smollm2.logits(hidden[at:at + n]), whole[at:at + n]), f"{n} rows from {at}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_qk_norm_and_biases_keep_their_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=256, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, attention_bias=True, max_position_embeddings=512)
    _, files = save_random(transformers.Qwen3ForCausalLM, config, tmp_path / "model")
    decoder = load(files, dtype)
    ids, positions = torch.arange(512) % 128, torch.arange(512)
    whole = decoder.forward(ids, positions, RowwiseAttention())
    for n in BATCHES:
        rows = slice(512 - n, 512)
        assert torch.equal(decoder.forward(ids[rows], positions[rows], RowwiseAttention()), whole[rows]), n


def test_sequences_in_one_step_do_not_touch_each_other(smollm2: Decoder) -> None:
    """The reference attention works sequence by sequence, so the rest of the step must as well."""
    prompts = [list(range(10, 10 + n)) for n in (5, 1, 9)]
    ids = torch.tensor([i for p in prompts for i in p])
    positions = torch.cat([torch.arange(len(p)) for p in prompts])
    together = smollm2.forward(ids, positions, CausalAttention([len(p) for p in prompts]))
    for prompt, rows in zip(prompts, together.split([len(p) for p in prompts]), strict=True):
        alone = smollm2.forward(torch.tensor(prompt), torch.arange(len(prompt)), CausalAttention([len(prompt)]))
        assert torch.equal(alone, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (96, 64), (2048, 2048), (300, 1001)], ids=str)
def test_linears_sum_in_one_order_from_the_rows_on_that_were_measured(
        shape: tuple[int, int], dtype: torch.dtype) -> None:
    """On numbers of which only the order of summation is left (`layers.cancelling`)."""
    x, weight = cancelling(*shape, 600, dtype)
    linear = Linear(weight)
    fewest = RowStability(dtype).of([linear])
    assert fewest is not None
    whole, activated = linear(x), linear.silu(x)
    assert whole.abs().max() > 0
    for n in (*range(fewest, 20), 31, 33, 64, 100, 257, 511):
        for at in (0, 3):
            assert torch.equal(linear(x[at:at + n]), whole[at:at + n]), f"{n} rows from {at}"
            assert torch.equal(linear.silu(x[at:at + n]), activated[at:at + n]), f"{n} rows from {at}"


def test_attention_sees_only_the_real_rows_of_a_short_step(smollm2: Decoder) -> None:
    seen = set()

    class Counting(RowwiseAttention):
        def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen.add((q.shape, k.shape, v.shape))
            return super().attend(layer, q, k, v)

    hidden = smollm2.forward(torch.tensor([5, 6]), torch.tensor([0, 1]), Counting())
    assert hidden.shape == (2, 576)
    assert seen == {((2, 9, 64), (2, 3, 64), (2, 3, 64))}


def test_cancelling_numbers_show_a_changed_order() -> None:
    """The probe can fail: the same products summed in two halves, as a split over K does, give other bits."""
    x, weight = cancelling(64, 1536, 4, torch.float32)
    whole = x @ weight.T
    halves = x[:, :700] @ weight[:, :700].T + x[:, 700:] @ weight[:, 700:].T
    assert not torch.equal(whole, halves)
    assert torch.allclose(whole, halves, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rows_keep_their_bits(dtype: torch.dtype) -> None:
    x = torch.randn(512, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm = RmsNorm(torch.linspace(0.5, 2, 576).to(dtype), 1e-5)
    whole = norm(x)
    for n in BATCHES:
        assert torch.equal(norm(x[512 - n:]), whole[512 - n:]), n


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    x = torch.randn(8, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.linspace(0.5, 2, 576).to(dtype)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    tolerance = 2e-6 if dtype is torch.float32 else 8e-3
    assert torch.allclose(RmsNorm(weight, 1e-5)(x).float(), expected.float(), rtol=tolerance)
