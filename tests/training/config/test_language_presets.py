"""The sizes of the paper, from the preset files to the parameters of the built model."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from polyvision.models.language.transformer import Transformer, TransformerShape
from polyvision.training.config.compose import compose
from polyvision.training.tasks.language import transformer_shape

# Tables 5 and 10: width, FFN hidden (gated / ungated), layers, context, and the name's millions.
DENSE = {
    "lm_110m": (768, 2048, 3072, 12, 2048, 110),
    "lm_226m": (1024, 2560, 3840, 16, 2048, 226),
    "lm_502m": (1536, 4096, 6144, 16, 2048, 502),
    "lm_1b3": (2048, 5504, 8256, 24, 4096, 1280),
}
LLAMA_VOCABULARY, OLMOE_VOCABULARY = 32000, 50304


SMALL = ("lm_tiny", "lm_mini", "moe_tiny")


@functools.cache
def presets() -> dict[str, TransformerShape]:
    """All presets, composed once; vocabulary and activation are put in afterwards."""
    configs = compose("language", ["model=" + ",".join([*DENSE, *SMALL, "lm_moe_1b7b"])])
    return {c.model.name: transformer_shape(c.model, c.act, 2) for c in configs}


def shape_of(name: str, act: str, vocabulary: int, **changes: Any) -> TransformerShape:
    options = {} if act != "polynorm" else presets()[name].activation_options
    return dataclasses.replace(
        presets()[name],
        vocab_size=vocabulary,
        activation=act,
        activation_options=options,
        **changes,
    )


def on_meta(shape: TransformerShape) -> Transformer:
    with torch.device("meta"):
        return Transformer(shape)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("act", ["swiglu", "polynorm", "gelu"])
def test_dense_presets(name: str, act: str) -> None:
    """Two or three FFN matrices, four attention matrices, two norms; PolyNorm has 4 values."""
    width, gated, ungated, layers, context, millions = DENSE[name]
    shape = shape_of(name, act, LLAMA_VOCABULARY)
    model = on_meta(shape)
    assert (shape.heads, shape.context, shape.layers) == (16, context, layers)
    hidden = gated if act == "swiglu" else ungated
    assert model.blocks[-1].ffn.up.weight.shape == (hidden, width)
    ffn = (3 if act == "swiglu" else 2) * width * hidden + (4 if act == "polynorm" else 0)
    body = layers * (4 * width**2 + ffn + 2 * width) + width
    assert model.num_parameters == body + 2 * LLAMA_VOCABULARY * width
    assert model.num_active_parameters == model.num_parameters
    # The names count one of the two embeddings.
    assert (body + LLAMA_VOCABULARY * width) / 1e6 == pytest.approx(millions, rel=0.005)
    tied = on_meta(dataclasses.replace(shape, tie_embeddings=True))
    assert tied.num_parameters == body + LLAMA_VOCABULARY * width


def test_dense_totals() -> None:
    totals = {n: on_meta(shape_of(n, "polynorm", LLAMA_VOCABULARY)).num_parameters for n in DENSE}
    assert totals == {
        "lm_110m": 134_105_904,
        "lm_226m": 258_507_840,
        "lm_502m": 551_339_584,
        "lm_1b3": 1_345_423_456,
    }


@pytest.mark.parametrize(("act", "hidden"), [("swiglu", 1024), ("polynorm", 1536)])
def test_mixture_of_experts(act: str, hidden: int) -> None:
    """Table 6: 6.9 billion parameters, 1.3 active."""
    shape = shape_of("lm_moe_1b7b", act, OLMOE_VOCABULARY)
    model = on_meta(shape)
    assert (shape.context, shape.heads, shape.layers) == (4096, 16, 16)
    assert (shape.moe.experts, shape.moe.top_k) == (64, 8)
    assert model.blocks[0].ffn.up.shape == (64, hidden, 2048)
    assert model.blocks[0].attention.query_norm.weight.shape == (2048,)
    expert = (3 if act == "swiglu" else 2) * 2048 * hidden
    layer = 4 * 2048**2 + 64 * 2048 + 4 * 2048 + (4 if act == "polynorm" else 0)
    rest = 16 * layer + 2048 + 2 * OLMOE_VOCABULARY * 2048
    assert model.num_parameters == rest + 16 * 64 * expert
    assert model.num_active_parameters == rest + 16 * 8 * expert
    assert model.num_parameters / 1e9 == pytest.approx(6.9, abs=0.05)
    assert model.num_active_parameters / 1e9 == pytest.approx(1.3, abs=0.05)
    if act == "polynorm":
        each = dataclasses.replace(shape.moe, expert_coefficients=True)
        assert (
            on_meta(dataclasses.replace(shape, moe=each)).num_parameters
            == model.num_parameters + 16 * 63 * 4
        )


@pytest.mark.parametrize("name", SMALL)
def test_small_presets_have_equal_parameters_gated_or_not(name: str) -> None:
    sizes = [on_meta(shape_of(name, a, 256)).num_parameters for a in ("relu", "swiglu", "geglu")]
    assert len(set(sizes)) == 1
    assert sizes[0] < 5e6


def test_a_token_of_moe_tiny_meets_the_ffn_of_lm_tiny() -> None:
    moe, dense = (on_meta(shape_of(n, "relu", 256)) for n in ("moe_tiny", "lm_tiny"))
    extra = 4 * (8 * 128 + 2 * 128)  # routers, norms of queries and keys
    assert moe.num_active_parameters == dense.num_parameters + extra


def test_initial_values_of_paper_and_released_code() -> None:
    """Table 7; Megatron divides the outputs by sqrt(2 layers), the OLMoE file says 0.02."""
    sizes = {"width": 64, "heads": 4, "layers": 2, "ffn_hidden": 192}
    paper = 1 / math.sqrt(2.5 * 64)

    def stds(name: str, **changes: Any) -> list[float]:
        model = Transformer(shape_of(name, "gelu", 300, **sizes, **changes))
        down = model.blocks[1].ffn.down
        return [m.std().item() for m in (model.embedding.weight, getattr(down, "weight", down))]

    assert stds("lm_1b3") == pytest.approx([paper, paper], rel=0.03)
    scaled = stds("lm_1b3", init_depth_scaled=True)
    assert scaled == pytest.approx([paper, paper / 2], rel=0.03)
    cut = 0.98658  # standard deviation of a normal distribution cut at 3
    few = dataclasses.replace(presets()["lm_moe_1b7b"].moe, experts=8)
    assert stds("lm_moe_1b7b", moe=few) == pytest.approx([cut * paper] * 2, rel=0.03)
    released = stds("lm_moe_1b7b", moe=few, init_std=0.02)
    assert released == pytest.approx([cut * 0.02] * 2, rel=0.03)
    model = Transformer(shape_of("lm_moe_1b7b", "gelu", 300, **sizes, moe=few))
    assert model.embedding.weight.abs().max() <= 3 * paper


def test_mistakes_name_their_key() -> None:
    with pytest.raises(ValueError, match=r"model\.moe\.top_k must be at least 1, got 0"):
        compose("language", ["model=moe_tiny", "model.moe.top_k=0"])
    with pytest.raises(ValueError, match=r"top_k=9 must be at most experts=8"):
        dataclasses.replace(presets()["moe_tiny"].moe, top_k=9)
    with pytest.raises(ValueError, match=r"model\.moe"):
        compose("language", ["model=lm_tiny", "model.moe.experts=4"])
