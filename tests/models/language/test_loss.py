"""Cross-entropy without logits against torch's, in value, gradient and memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyvision.analysis.cost.saved_bytes import SavedTensors
from polyvision.models.language.loss import linear_cross_entropy
from polyvision.models.language.transformer import Transformer, TransformerShape


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(7, 5, dtype=dtype), torch.randn(11, 5, dtype=dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(11, (7,))


def plain(x: Tensor, weight: Tensor, targets: Tensor, z_weight: float) -> Tensor:
    logits = x @ weight.T
    kept = targets != -100
    z = logits.logsumexp(-1).square()[kept].sum()
    return F.cross_entropy(logits, targets, reduction="sum") + z_weight * z


@pytest.mark.parametrize("z_weight", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 1, 3, 7])
def test_value_and_gradients(chunk: int | None, z_weight: float) -> None:
    x, weight, targets = operands()
    targets[[1, 4]] = -100
    loss, nats = linear_cross_entropy(x, weight, targets, z_weight=z_weight, chunk=chunk)
    expected = plain(x, weight, targets, z_weight)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nats, plain(x, weight, targets, 0.0).detach())
    assert not nats.requires_grad
    found = torch.autograd.grad(0.37 * loss, (x, weight), retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(0.37 * expected, (x, weight)))
    torch.testing.assert_close(torch.autograd.grad(0.37 * loss, (x, weight)), found)  # again


def test_gradcheck() -> None:
    x, weight, targets = operands()
    assert torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, targets, z_weight=0.3, chunk=2)[0], (x, weight)
    )


def test_only_what_is_asked_for() -> None:
    x, weight, targets = operands()
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, weight.detach(), targets)[0], x)
    torch.testing.assert_close(dx, torch.autograd.grad(plain(x, weight, targets, 0.0), x)[0])
    with torch.no_grad(), SavedTensors() as saved:
        linear_cross_entropy(x, weight, targets)
    assert saved.bytes == 0


def test_all_ignored_is_zero() -> None:
    x, weight, _ = operands()
    loss, _ = linear_cross_entropy(x, weight, torch.full((7,), -100))
    loss.backward()
    assert loss == 0
    assert (x.grad == 0).all()
    assert (weight.grad == 0).all()
    model = Transformer(
        TransformerShape(vocab_size=11, context=8, width=8, layers=1, heads=2, ffn_hidden=12)
    )
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert model(tokens, torch.full_like(tokens, -100)).total == 0


def test_large_logits() -> None:
    x, weight, targets = operands()
    with torch.no_grad():
        x.mul_(1e4)
    loss, _ = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(loss, plain(x, weight, targets, 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    """Within the rounding of logits; a loss scaled as a gradient scaler does loses nothing."""
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(50, 32, requires_grad=True)
    targets = torch.randint(50, (64,))
    with torch.autocast("cpu", dtype):
        loss, _ = linear_cross_entropy(x, weight, targets, chunk=24)
    exact = plain(x.double(), weight.double(), targets, 0.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=4 * torch.finfo(dtype).eps)
    found = torch.autograd.grad(loss / 2**22, (x, weight))
    expected = torch.autograd.grad(exact / 2**22, (x, weight))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 8 * torch.finfo(dtype).eps * b.norm()


def test_memory_does_not_grow_with_tokens_times_words() -> None:
    """2,048 tokens of 20,000 words: logits would be 164 MB; two gradients of 2 MB are kept."""
    x = torch.randn(2048, 24, requires_grad=True)
    weight = torch.randn(20_000, 24, requires_grad=True)
    with SavedTensors() as saved:
        linear_cross_entropy(x, weight, torch.randint(20_000, (2048,)))
    assert saved.bytes == 4 * (x.numel() + weight.numel())


def test_a_second_derivative_is_refused() -> None:
    x, weight, targets = operands()
    loss = linear_cross_entropy(x, weight, targets)[0]
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        dx.sum().backward()
