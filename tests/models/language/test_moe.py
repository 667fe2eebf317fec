"""The mixture of experts against a loop over tokens, closed forms of its losses, and its edges."""

from __future__ import annotations

import dataclasses
import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed.nn.functional  # before there is a group, which it would keep alive
from torch import Tensor, nn

from polyvision.analysis.cost.saved_bytes import SavedTensors
from polyvision.errors import PolyvisionError
from polyvision.models.language.grouped import (
    grouped_matmul,
    grouped_outer,
    loop_matmul,
    loop_outer,
)
from polyvision.models.language.moe import MoE
from polyvision.models.language.router import Router, assign
from polyvision.models.language.shape import MoEShape
from polyvision.models.language.transformer import Transformer, TransformerShape

EXPERTS = MoEShape(experts=5, top_k=2)
SHAPE = TransformerShape(
    vocab_size=31, context=16, width=16, layers=2, heads=2, ffn_hidden=24, qk_norm=True, moe=EXPERTS
)


def build(activation: str = "polynorm", moe: MoEShape = EXPERTS, **options: Any) -> MoE:
    """A float64 mixture whose values all differ, coefficients included."""
    layer = MoE(8, 24, moe, activation, options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return layer


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return bias + sum(
        w * x**i / (x ** (2 * i)).mean().add(1e-6).sqrt() for i, w in enumerate(weight, 1)
    )


def token_by_token(layer: MoE, x: Tensor) -> Tensor:
    """The definition, one token and one expert at a time."""
    moe, rows = layer.router.moe, []
    for token in x.flatten(0, -2):
        p = (layer.router.weight @ token).softmax(0)
        chosen = sorted(range(moe.experts), key=lambda i: -p[i].item())[: moe.top_k]
        shares = p[chosen] / p[chosen].sum() if moe.normalise else p[chosen]
        out = torch.zeros_like(token)
        for share, e in zip(shares, chosen, strict=True):
            h = layer.up[e] @ token
            if layer.gate is not None:
                h = silu(layer.gate[e] @ token) * h
            else:
                weight, bias = layer.activation.weight, layer.activation.bias
                if moe.expert_coefficients:
                    weight, bias = weight[e], bias[e]
                h = poly_norm(h, weight, bias)
            out = out + share * (layer.down[e] @ h)
        rows.append(out)
    return torch.stack(rows).view(x.shape)


CASES = {
    "shared": ("polynorm", {}),
    "own": ("polynorm", {"expert_coefficients": True}),
    "gated": ("swiglu", {}),
    "normalised": ("polynorm", {"normalise": True}),
    "one": ("polynorm", {"top_k": 1}),
    "all": ("swiglu", {"top_k": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str) -> None:
    activation, changes = CASES[case]
    layer = build(activation, dataclasses.replace(EXPERTS, **changes))
    x = torch.randn(3, 7, 8, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    out, expected = layer(x)[0], token_by_token(layer, x)
    torch.testing.assert_close(out, expected)
    probe = torch.randn_like(out)
    found = torch.autograd.grad((out * probe).sum(), wanted)
    torch.testing.assert_close(found, torch.autograd.grad((expected * probe).sum(), wanted))


def test_coefficients_of_each_expert_are_its_own() -> None:
    layer = build("polyrelu", dataclasses.replace(EXPERTS, expert_coefficients=True))
    assert layer.activation.weight.shape == (5, 3)
    x = torch.randn(40, 8, dtype=torch.float64)
    before = layer(x)[0]
    with torch.no_grad():
        layer.activation.weight[3] += 1
    chosen = layer.router(x)[1]
    changed = (layer(x)[0] != before).any(-1).nonzero()[:, 0]
    assert changed.tolist() == sorted(chosen.token[chosen.expert == 3].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [8, 12, 5])
def test_grouped_products_equal_a_loop(dtype: torch.dtype, width: int) -> None:
    x, y = torch.randn(11, 8).to(dtype), torch.randn(11, width).to(dtype)
    weight = torch.randn(4, 8, width).to(dtype)
    ends = torch.tensor([3, 3, 10, 11], dtype=torch.int32)  # the second group has no rows
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(
        grouped_matmul(x, weight, ends), loop_matmul(x, weight, ends), **close
    )
    outer = grouped_outer(x, y, ends)
    torch.testing.assert_close(outer, loop_outer(x, y, ends), **close)
    assert (outer[1] == 0).all()


def test_grouped_products_are_operations_of_torch() -> None:
    x, y = (torch.randn(6, n, dtype=torch.float64, requires_grad=True) for n in (3, 2))
    weight = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([4, 6], dtype=torch.int32)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(grouped_matmul, (x, weight, ends), test_utils=tests)
    torch.library.opcheck(grouped_outer, (x, y, ends), test_utils=tests)
    assert torch.autograd.gradgradcheck(grouped_matmul, (x, weight, ends))


def test_assignment() -> None:
    chosen = torch.tensor([[2, 0], [0, 3], [2, 3]])
    a = assign(chosen, 5)
    assert a.expert.tolist() == [0, 0, 2, 2, 3, 3]
    assert a.token.tolist() == [0, 1, 0, 2, 1, 2]
    assert a.ends.tolist() == [2, 2, 4, 6, 6]
    assert torch.equal(chosen.flatten()[a.order][a.inverse], chosen.flatten())


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_losses_of_a_balanced_router(top_k: int) -> None:
    """Balance is 1 for every top_k; logits s and 0 give a z-loss and an entropy in closed form."""
    s, e = 1.5, 8
    router = Router(e, MoEShape(e, top_k)).double()
    with torch.no_grad():
        router.weight.copy_(s * torch.eye(e))
    x = sum(torch.eye(e, dtype=torch.float64).roll(i, 1) for i in range(top_k))  # token n: n..n+k-1
    routing = router(x)[2]
    torch.testing.assert_close(routing.load, torch.full((e,), 1 / e, dtype=torch.float64))
    total = top_k * math.exp(s) + e - top_k
    p = math.exp(s) / total
    assert routing.balance.item() == pytest.approx(1)
    assert routing.z.item() == pytest.approx(math.log(total) ** 2)
    entropy = -top_k * p * math.log(p) + (e - top_k) / total * math.log(total)
    assert routing.entropy.item() == pytest.approx(entropy)


def test_losses_of_a_router_that_sends_all_to_one() -> None:
    """All tokens the same: f is 1 for one expert, so the balance is E times its probability."""
    router = Router(4, MoEShape(4, 1)).double()
    with torch.no_grad():
        router.weight.copy_(torch.diag(torch.tensor([2.0, 0, 0, 0])))
    routing = router(torch.eye(4, dtype=torch.float64)[:1].expand(6, -1))[2]
    assert routing.balance.item() == pytest.approx(4 * math.exp(2) / (math.exp(2) + 3))
    assert routing.load.tolist() == [1, 0, 0, 0]


def pooled_balance(logits: torch.Tensor, top_k: int) -> float:
    """Load balance as Hugging Face's OLMoE has it: means over all layers first, no division by K.

    Args:
        logits: (layers, tokens, experts).
        top_k: K.
    """
    p = logits.flatten(0, 1).softmax(-1)
    assigned = torch.zeros_like(p).scatter(1, p.topk(top_k).indices, 1.0)
    return (p.shape[1] * (assigned.mean(0) * p.mean(0)).sum()).item()


def our_balance(logits: torch.Tensor, top_k: int) -> float:
    """The mean over the layers, as ``Transformer`` adds it to the loss."""
    experts = logits.shape[-1]
    router = Router(experts, MoEShape(experts, top_k)).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
    return torch.stack([router(layer)[2].balance for layer in logits]).mean().item()


def test_layers_do_not_balance_each_other() -> None:
    """Each layer sends all to an expert of its own: 3 e^2 / (e^2 + 2) here, 1 over the pool."""
    logits = 2 * torch.eye(3, dtype=torch.float64)[:, None].expand(3, 4, 3)
    assert our_balance(logits, 1) == pytest.approx(3 * math.exp(2) / (math.exp(2) + 2))
    assert pooled_balance(logits, 1) == pytest.approx(1)
    assert our_balance(logits[:1], 1) == pytest.approx(pooled_balance(logits[:1], 1))


def test_the_pooled_load_balance_is_that_of_hugging_face() -> None:
    olmoe = pytest.importorskip("transformers.models.olmoe.modeling_olmoe")
    logits = torch.randn(3, 16, 8, dtype=torch.float64)
    theirs = olmoe.load_balancing_loss_func(tuple(logits), num_experts=8, top_k=2).item()
    assert theirs == pytest.approx(pooled_balance(logits, 2))
    one = olmoe.load_balancing_loss_func((logits[0],), num_experts=8, top_k=2).item()
    assert one == pytest.approx(2 * our_balance(logits[:1], 2))  # K times
    assert our_balance(logits, 2) > theirs / 2


def test_the_router_computes_in_fp32() -> None:
    """Logits that bf16 cannot tell apart."""
    router = Router(8, MoEShape(2, 1))
    with torch.no_grad():
        router.weight.fill_(1.0)
        router.weight[1, 0] += 2**-12
    x = torch.ones(1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        weights, assignment, routing = router(x)
    assert assignment.expert.item() == 1
    assert weights.dtype == routing.balance.dtype == torch.float32


def test_experts_without_tokens_get_zero_gradients() -> None:
    layer = build("swiglu", dataclasses.replace(EXPERTS, top_k=1))
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2, 0] = 9.0
    x = torch.rand(4, 8, dtype=torch.float64) + 0.1
    y, routing = layer(x)
    (y.sum() + routing.balance).backward()
    assert routing.load.tolist() == [0, 0, 1, 0, 0]
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if parameter.ndim == 3:
            assert (parameter.grad[[0, 1, 3, 4]] == 0).all()
            assert (parameter.grad[2] != 0).any()


def test_ddp_finds_no_unused_parameter(tmp_path: Any) -> None:
    model = Transformer(SHAPE)
    with torch.no_grad():
        for block in model.blocks:  # every token to the first two experts
            block.ffn.router.weight.zero_()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            parallel(*torch.randint(31, (2, 2, 8))).total.backward()
        del parallel  # it holds the group, and so the threads of gloo
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("activation", ["polynorm", "swiglu"])
def test_what_is_kept_for_the_backward_pass(activation: str) -> None:
    """Pre-activations of K experts and the tokens once, besides the small things of routing."""
    layer = MoE(64, 96, MoEShape(4, 2), activation)
    layer.init_matrices(lambda matrix, _: nn.init.normal_(matrix, std=0.1))
    x = torch.randn(512, 64, requires_grad=True)
    with SavedTensors() as saved:
        layer(x)
    weights = 4 * sum(p.numel() for p in layer.parameters())
    hidden = 2 * (2 * 64 if activation == "swiglu" else 96)
    small = 6 * 4 + 6 * 2 * 8  # logits and probabilities of 4 experts, places of 2
    assert (saved.bytes - weights) / 512 <= 4 * (64 + hidden) + 4 * small


def step(model: Transformer, call: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    losses = call(*batch)
    losses.total.backward()
    return losses.total.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_checkpointing_repeats_the_routing() -> None:
    plain = Transformer(SHAPE)
    kept = Transformer(dataclasses.replace(SHAPE, checkpointing=True))
    kept.load_state_dict(plain.state_dict())
    batch = torch.randint(31, (2, 3, 16))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = step(plain, plain, batch), step(kept, kept, batch)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_the_whole_loss_is_one_graph() -> None:
    model, batch = Transformer(dataclasses.replace(SHAPE, layers=1)), torch.randint(31, (2, 2, 8))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*batch).total, model(*batch).total)


@pytest.mark.slow
@pytest.mark.parametrize("moe", [None, dataclasses.replace(EXPERTS, expert_coefficients=True)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_compiled_step_equals_the_plain_one(moe: MoEShape | None, checkpointing: bool) -> None:
    model = Transformer(dataclasses.replace(SHAPE, checkpointing=checkpointing, moe=moe))
    batch = torch.randint(31, (2, 2, 8))
    expected = step(model, model, batch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    torch.testing.assert_close(step(model, compiled, batch), expected, rtol=1e-4, atol=1e-5)


def test_the_losses_of_a_model() -> None:
    model, (inputs, targets) = Transformer(SHAPE), torch.randint(31, (2, 3, 8))
    losses = model(inputs, targets)
    logits = model(inputs).flatten(0, 1)
    nats = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    torch.testing.assert_close(losses.nats, nats)
    assert losses.tokens == 24
    assert losses.routing.load.shape == (2, 5)
    extra = 0.01 * losses.routing.balance.mean() + 0.001 * losses.routing.z.mean()
    torch.testing.assert_close(losses.total, nats / 24 + extra)
    losses.total.backward()
    assert all(block.ffn.router.weight.grad.abs().max() > 0 for block in model.blocks)


@pytest.mark.parametrize(
    ("activation", "moe", "text"),
    [
        ("gelu", {"expert_coefficients": True}, r"'gelu' has none: choose act= one of: polynorm"),
        ("polynrom", {}, "unknown activation 'polynrom'"),
        ("relu", {"top_k": 6}, r"top_k=6 must be at most experts=5"),
        ("relu", {"experts": 0}, r"experts must be at least 1, got 0"),
        ("relu", {"router_z": -1.0, "normalise": 1}, r"router_z .* got -1.0; normalise .* got 1"),
    ],
)
def test_errors(activation: str, moe: dict[str, Any], text: str) -> None:
    with pytest.raises(PolyvisionError, match=text):
        build(activation, dataclasses.replace(EXPERTS, **moe))
