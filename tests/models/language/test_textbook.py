"""Our model against a textbook Llama written apart from it, with the same weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks import cross_entropy
from benchmarks.llama import TextbookLlama
from benchmarks.memory import added_peak, in_own_process
from benchmarks.train_lm import OURS, contender, ffn_bytes
from polyvision.models.language.transformer import Transformer, TransformerShape

SHAPE = TransformerShape(vocab_size=37, context=12, width=24, layers=2, heads=3, ffn_hidden=36)


def copied(ours: Transformer, textbook: TextbookLlama) -> TextbookLlama:
    """Put the weights of ``ours`` into ``textbook``."""
    weights = {"embedding.weight": ours.embedding.weight, "head.weight": ours.head.weight}
    weights["norm.weight"] = ours.norm.weight
    for i, block in enumerate(ours.blocks):
        parts = zip("qkv", block.attention.qkv.weight.chunk(3), strict=True)
        weights |= {f"blocks.{i}.{name}.weight": matrix for name, matrix in parts}
        weights[f"blocks.{i}.out.weight"] = block.attention.out.weight
        weights[f"blocks.{i}.norm1.weight"] = block.attention_norm.weight
        weights[f"blocks.{i}.norm2.weight"] = block.ffn_norm.weight
        for name, value in block.ffn.state_dict().items():
            weights[f"blocks.{i}.ffn.{name.replace('activation', 'act')}"] = value
    textbook.load_state_dict(weights)
    return textbook


@pytest.mark.parametrize("act", ["swiglu", "polynorm"])
def test_losses_and_gradients_are_those_of_the_textbook(act: str) -> None:
    ours, loss_of = contender(f"ours, {act}", SHAPE)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)  # coefficients that all differ
    textbook = copied(ours.double(), TextbookLlama(SHAPE, act == "swiglu").double())
    tokens = torch.randint(37, (2, 13))
    loss = loss_of(tokens[:, :-1], tokens[:, 1:])
    logits = textbook(tokens[:, :-1])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    for mine, theirs in (
        (ours.embedding.weight, textbook.embedding.weight),
        (ours.blocks[0].ffn.up.weight, textbook.blocks[0].ffn.up.weight),
    ):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    assert sum(p.numel() for p in ours.parameters()) == sum(
        p.numel() for p in textbook.parameters()
    )


@pytest.mark.parametrize("act", ["swiglu", "polynorm"])
def test_fifty_steps_give_the_losses_of_the_textbook(act: str) -> None:
    """Kernels, recomputed FFN and loss in chunks against plain operations, in fp32."""
    ours, loss_of = contender(f"ours, {act}", SHAPE)
    textbook = copied(ours, TextbookLlama(SHAPE, act == "swiglu"))
    text = torch.randint(37, (8, 13))  # to be learned by heart

    def expected_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(textbook(inputs).flatten(0, 1), targets.flatten())

    curves = []
    for model, loss in ((ours, loss_of), (textbook, expected_of)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        curve = []
        for _ in range(50):
            optimizer.zero_grad()
            value = loss(text[:, :-1], text[:, 1:])
            value.backward()
            optimizer.step()
            curve.append(value.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)
    assert curves[0][-1] < 0.5 * curves[0][0]


def test_bytes_kept_are_counted_without_parameters() -> None:
    shape = dataclasses.replace(SHAPE, width=24, ffn_hidden=96)
    kept = ffn_bytes(shape)
    assert set(kept) == {
        *(f"ours, {act}" for act in OURS),
        "textbook, swiglu",
        "textbook, polynorm",
    }
    # fp32: x, and gate, up, silu(gate) and their product of 64 each.
    assert kept["textbook, swiglu"] == 4 * (24 + 4 * 64)
    assert kept["ours, swiglu"] == 4 * (24 + 2 * 64)
    assert kept["ours, gelu"] == 4 * (24 + 96)
    assert kept["ours, polynorm"] < 0.55 * kept["textbook, swiglu"]


def test_the_cross_entropies_agree() -> None:
    operands = cross_entropy.operands(words=61, width=8, tokens=20)
    losses, slopes = [], []
    for name in cross_entropy.CONTENDERS:
        losses.append(cross_entropy.step(name, *operands))
        slopes.append(torch.cat([tensor.grad.flatten() for tensor in operands[:2]]))
    assert len(losses) >= 2
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-6)
    for slope in slopes:
        torch.testing.assert_close(slope, slopes[0])


def peak_of_64_mib() -> int | None:
    big = torch.ones(2**25)  # an earlier peak of 128 MiB must not count
    del big
    return added_peak(lambda: torch.ones(2**24).sum())


def test_a_peak_counts_what_was_given_back() -> None:
    # In a process of its own, as in the benchmarks: here other tests' memory may be given back
    # meanwhile.
    peak = in_own_process(peak_of_64_mib)
    if peak is None:
        pytest.skip("this system does not tell the peak of memory")
    assert 60 <= peak / 2**20 <= 80
