"""FLOPs and bytes of a step against counted ones, and against closed forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from polyvision.activations import PolyNorm
from polyvision.analysis.cost.estimate import estimate_cost, token_flops
from polyvision.analysis.cost.flops import matrix_counter
from polyvision.models.language.shape import MoEShape, TransformerShape
from polyvision.models.language.transformer import Transformer

SHAPE = TransformerShape(
    vocab_size=64, context=32, width=16, layers=2, heads=4, kv_heads=2, ffn_hidden=24
)
SHAPES = {
    "polynorm": SHAPE,
    "swiglu": dataclasses.replace(SHAPE, activation="swiglu"),
    "moe": dataclasses.replace(SHAPE, moe=MoEShape(4, 2), activation="relu2"),
    "moe gated": dataclasses.replace(SHAPE, moe=MoEShape(4, 3), activation="swiglu"),
}
# FLOPs of the activation for each hidden element, as the paper has them.
ACTIVATION = {"polynorm": 18, "swiglu": 14, "relu2": 2}


@pytest.mark.parametrize("name", SHAPES)
def test_the_formula_equals_counted_flops(name: str) -> None:
    shape = SHAPES[name]
    model, tokens = Transformer(shape), torch.randint(64, (3, 20))
    with matrix_counter() as counter, torch.no_grad():
        model(tokens)
    hidden = 16 if shape.activation == "swiglu" else 24
    visits = shape.moe.top_k if shape.moe else 1
    active = shape.layers * visits * hidden * ACTIVATION[shape.activation]
    assert 60 * (token_flops(model, 20) - active) == counter.get_total_flops()


@pytest.mark.parametrize("name", SHAPES)
def test_a_training_step_takes_three_times_the_forward_pass(name: str) -> None:
    """Counted products of both passes, but for attention on CPUs, whose backward is not counted.

    The router's logits, computed again in the backward pass, are no work of the model.
    """
    model, tokens = Transformer(SHAPES[name]), torch.randint(64, (2, 3, 20))
    forward, both = matrix_counter(), matrix_counter()
    with forward, torch.no_grad():
        model(tokens[0])
    with both:
        model(*tokens).total.backward()
    attention = 2 * 4 * 60 * 20 * 16  # layers x 4 T w, for each of 60 tokens
    products = forward.get_total_flops() - attention
    again = 2 * 60 * 2 * 16 * SHAPES[name].moe.experts if SHAPES[name].moe else 0
    assert both.get_total_flops() - attention - again == 3 * products


def test_the_cost_of_a_language_model() -> None:
    model = Transformer(SHAPE)
    cost = estimate_cost(model, lambda: torch.zeros(4, 32, dtype=torch.int64), torch.float32)
    assert cost.flops == 128 * token_flops(model, 32)
    checkpointed = Transformer(dataclasses.replace(SHAPE, checkpointing=True))
    less = estimate_cost(checkpointed, lambda: torch.zeros(4, 32, dtype=torch.int64), torch.float32)
    inputs = 2 * 128 * 16 * 4  # what enters each block
    assert inputs < less.saved_bytes < cost.saved_bytes / 2
    assert less.flops == cost.flops


def test_activations_of_any_network_are_counted() -> None:
    model = nn.Sequential(nn.Linear(8, 16), PolyNorm(), nn.Linear(16, 4))
    cost = estimate_cost(model, lambda: torch.zeros(5, 8), torch.float32)
    assert cost.flops == 5 * (2 * 8 * 16 + 2 * 16 * 4 + 18 * 16)
