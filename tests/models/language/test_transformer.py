"""The decoder against a plain float64 implementation, closed forms and the paper's sizes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from polyvision.errors import PolyvisionError
from polyvision.models.language.attention import apply_rotary, rotary_table
from polyvision.models.language.transformer import Transformer, TransformerShape

SMALL = TransformerShape(
    vocab_size=61, context=16, width=24, layers=2, heads=4, kv_heads=2, ffn_hidden=36
)
# The paper's Tables 5 and 10: width, FFN hidden (gated / ungated), layers; always 16 heads.
PAPER = {
    "110M": (768, 2048, 3072, 12),
    "226M": (1024, 2560, 3840, 16),
    "502M": (1536, 4096, 6144, 16),
    "1.3B": (2048, 5504, 8256, 24),
}


def random_model(shape: TransformerShape = SMALL) -> Transformer:
    """A float64 model in which every value differs, norms and coefficients included."""
    model = Transformer(shape).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return model


def tokens(*size: int, vocab: int = SMALL.vocab_size) -> Tensor:
    return torch.randint(vocab, size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return bias + sum(w * rms_norm(x**i, torch.ones(()), 1e-6) for i, w in enumerate(weight, 1))


def plain_attention(x: Tensor, qkv: Tensor, out: Tensor, shape: TransformerShape) -> Tensor:
    """Softmax attention of one sequence, head by head, with rotation as complex numbers."""
    length, half = len(x), shape.width // shape.heads // 2
    kv_heads = shape.kv_heads or shape.heads
    frequency = shape.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turn = torch.exp(1j * torch.arange(length)[:, None] * frequency)  # (T, half)

    def rotated(v: Tensor) -> Tensor:
        z = torch.complex(v[:, :half], v[:, half:]) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    rows = (x @ qkv.T).split(2 * half, dim=-1)  # one (T, head_dim) per query, key and value head
    heads = []
    for h in range(shape.heads):
        kv = h // (shape.heads // kv_heads)
        q, k = rotated(rows[h]), rotated(rows[shape.heads + kv])
        v = rows[shape.heads + kv_heads + kv]
        scores = q @ k.T / math.sqrt(2 * half)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
    return torch.cat(heads, dim=-1) @ out.T


def plain_logits(model: Transformer, sequence: Tensor) -> Tensor:
    p, shape = dict(model.named_parameters()), model.shape
    x = p["embedding.weight"][sequence]
    for i in range(shape.layers):
        b = dict(model.blocks[i].named_parameters())
        n = rms_norm(x, b["attention_norm.weight"], shape.norm_eps)
        x = x + plain_attention(n, b["attention.qkv.weight"], b["attention.out.weight"], shape)
        n = rms_norm(x, b["ffn_norm.weight"], shape.norm_eps)
        h = poly_norm(
            n @ b["ffn.up.weight"].T, b["ffn.activation.weight"], b["ffn.activation.bias"]
        )
        x = x + h @ b["ffn.down.weight"].T
    return rms_norm(x, p["norm.weight"], shape.norm_eps) @ p["head.weight"].T


@pytest.mark.parametrize("kv_heads", [None, 4, 2, 1])
def test_logits_equal_a_plain_implementation(kv_heads: int | None) -> None:
    model = random_model(dataclasses.replace(SMALL, kv_heads=kv_heads, rope_theta=500.0))
    batch = tokens(3, 11)
    expected = torch.stack([plain_logits(model, row) for row in batch])
    torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("position", [0, 4, 10])
def test_a_token_changes_only_its_own_and_later_logits(position: int) -> None:
    model, batch = random_model(), tokens(2, 11)
    changed = batch.clone()
    changed[:, position] = (batch[:, position] + 1) % SMALL.vocab_size
    difference = (model(changed) - model(batch)).abs().amax(-1)
    assert (difference[:, :position] < 1e-12).all()
    assert (difference[:, position:] > 1e-6).all()


def test_every_parameter_takes_part() -> None:
    model = random_model()
    torch.nn.functional.cross_entropy(model(tokens(2, 16)).flatten(0, 1), tokens(32)).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_rotation_keeps_norms_and_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 12, dtype=torch.float64)

    def at(x: Tensor, position: int) -> Tensor:
        table = rotary_table(torch.tensor([position]), 12, 10000.0, torch.float64)
        return apply_rotary(x, table)

    torch.testing.assert_close(at(q, 0), q)
    torch.testing.assert_close(at(q, 77).norm(), q.norm())
    scores = [(at(q, start + 9) * at(k, start)).sum() for start in (0, 1, 50, 2000)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(4))
    assert abs(scores[0] - (at(q, 10) * at(k, 0)).sum()) > 1e-3


def test_a_model_in_bfloat16_rotates_by_exact_angles() -> None:
    """Angles held in bfloat16 would be wrong by whole radians at position 4001."""
    x = torch.randn(1, 1, 1, 12, dtype=torch.bfloat16)
    shape = dataclasses.replace(SMALL, context=4096)
    cos, sin = Transformer(shape).bfloat16()._rotation(torch.arange(4002))
    exact = rotary_table(torch.tensor([4001]), 6, shape.rope_theta, torch.float64)
    torch.testing.assert_close(cos[-1:].double(), exact[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[-1:].double(), exact[1], rtol=0, atol=1e-3)
    assert apply_rotary(x[..., :6], (cos[-1:], sin[-1:])).dtype == torch.bfloat16


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values() -> None:
    grouped = random_model(dataclasses.replace(SMALL, layers=1))
    full = Transformer(dataclasses.replace(SMALL, layers=1, kv_heads=4)).double()
    state = grouped.state_dict()
    q, k, v = state["blocks.0.attention.qkv.weight"].unflatten(0, (8, 6)).split((4, 2, 2))
    repeated = torch.cat((q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0))).flatten(0, 1)
    full.load_state_dict(state | {"blocks.0.attention.qkv.weight": repeated})
    batch = tokens(2, 9)
    torch.testing.assert_close(full(batch), grouped(batch))


@pytest.mark.parametrize(("name", "gated"), [(n, g) for n in PAPER for g in (False, True)])
def test_paper_sizes(name: str, gated: bool) -> None:
    """Two or three FFN matrices, four attention matrices, two norms; PolyNorm has 4 values."""
    width, gated_hidden, hidden, layers = PAPER[name]
    shape = TransformerShape(
        vocab_size=32000,
        context=2048,
        width=width,
        layers=layers,
        heads=16,
        ffn_hidden=hidden,
        activation="swiglu" if gated else "polynorm",
    )
    with torch.device("meta"):
        model = Transformer(shape)
    ffn = 3 * width * gated_hidden if gated else 2 * width * hidden + 4
    layer = 4 * width**2 + ffn + 2 * width
    assert model.num_parameters == 2 * 32000 * width + layers * layer + width
    assert model.blocks[0].ffn.up.out_features == (gated_hidden if gated else hidden)
    if name == "110M":
        assert model.num_parameters == (134_105_856 if gated else 134_105_904)


def test_initial_values() -> None:
    shape = dataclasses.replace(SMALL, vocab_size=500, width=160, ffn_hidden=300, heads=4)
    for name, parameter in Transformer(shape).named_parameters():
        if parameter.ndim == 2:
            ratio = parameter.std().item() * math.sqrt(2.5 * shape.width)
            kurtosis = (parameter / parameter.std()).pow(4).mean().item()
            assert ratio == pytest.approx(1, abs=0.02), name
            assert kurtosis == pytest.approx(3, abs=0.2), name  # normal, not uniform
        elif "norm" in name:
            assert (parameter == 1).all(), name
    coefficients = Transformer(shape).blocks[1].ffn.activation.weight
    torch.testing.assert_close(coefficients, torch.full((3,), 1 / 3))


def test_head_size_48_and_autocast() -> None:
    """The 110M model has heads of 48; bfloat16 stays within its rounding."""
    model = Transformer(dataclasses.replace(SMALL, width=96, heads=2, kv_heads=2))
    batch = tokens(2, 16)
    exact = model.double()(batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.float()(batch)
    assert (rounded - exact).norm() / exact.norm() < 0.03


def test_compiles_as_one_graph() -> None:
    model, batch = random_model(dataclasses.replace(SMALL, layers=1)), tokens(2, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(batch), model(batch))


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    Transformer(SMALL)(tokens(1, 16))
    with pytest.raises(PolyvisionError, match=r"17 tokens .* context of 16; crop it"):
        Transformer(SMALL)(tokens(1, 17))


def test_a_shape_that_does_not_fit_names_every_problem() -> None:
    with pytest.raises(PolyvisionError) as error:
        dataclasses.replace(
            SMALL, width=0, layers=2.0, heads=True, kv_heads=-1, norm_eps=0.0, rope_theta="x"
        )
    for text in ("width", "layers", "heads", "kv_heads", "norm_eps", "rope_theta"):
        assert f"{text} must be " in str(error.value)
    assert "context" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"width": 26}, r"even integer, got 26 / 4; take a width that is a multiple of 8"),
        ({"width": 20}, r"even integer, got 20 / 4"),
        ({"kv_heads": 3}, r"kv_heads=3 must divide heads=4"),
    ],
)
def test_heads_that_do_not_fit(change: dict[str, int], text: str) -> None:
    with pytest.raises(PolyvisionError, match=text):
        dataclasses.replace(SMALL, **change)
