"""Gated, normalising, stochastic and mixed activations in use: precision, export, training."""

from __future__ import annotations

import pytest
import timm
import torch
from activation_oracles import OVER_A_DIM, build, inputs
from torch import Tensor, nn

from polyvision import activation_names, create_activation, swap_activations
from polyvision.activations import activation_modules
from polyvision.models.language.transformer import Transformer, TransformerShape

NORMALISING = ["ash", "normsilu", "radial_bounding"]
UNGATED = [*NORMALISING, "rrelu", "stocha", "la", "moa"]
NAMES = [*activation_names("gated"), *UNGATED]

# The largest input that the docstring promises to be finite in fp16; 65,504 for all.
RANGE = {"la": 240, "moa": 240, "bi_moa": 13, "polyrelu_glu": 20, "powlu": 12_000}
PRODUCTS = ("bilinear", "reglu", "geglu", "swiglu", "drelu")
RANGE |= dict.fromkeys(PRODUCTS, 255)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "polynorm_glu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finite_in_half_precision_within_the_stated_range(name: str, dtype: torch.dtype) -> None:
    module = create_activation(name)
    if name == "rrelu":
        module.eval()  # torch trains it in fp16 on GPUs only
    high = float(RANGE.get(name, 65_504))
    points = torch.linspace(-high, high, 48)
    small = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 1e-3, -1.0, 1.0])
    x = torch.cat([points, small]).to(dtype)
    grid = torch.cartesian_prod(x, x).T
    xs = list(grid) if name in activation_names("gated") else [x]
    assert module(*xs).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name: str) -> None:
    module = build(name).double()
    xs = inputs(name, 3, 6)
    parameters = list(module.parameters())
    assert torch.autograd.gradcheck(lambda *_: module(*xs), (*xs, *parameters))


@pytest.mark.parametrize("name", NAMES)
def test_export(name: str) -> None:
    module = build(name).eval()
    xs = tuple(x.detach() for x in inputs(name, 3, 6, dtype=torch.float32))
    exported = torch.export.export(module, xs).module()
    torch.testing.assert_close(exported(*xs), module(*xs))


def compiled_as_eager(name: str, backend: str) -> None:
    torch._dynamo.reset()
    module = build(name)
    xs = inputs(name, 4, 6, dtype=torch.float32)
    variables = [*xs, *module.parameters()]
    got, want = torch.compile(module, fullgraph=True, backend=backend)(*xs), module(*xs)
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(got, variables, upstream),
        torch.autograd.grad(want, variables, upstream),
    )


@pytest.mark.parametrize("name", ["powlu", "ash", "stocha", "la"])
def test_the_compiler_sees_one_graph(name: str) -> None:
    compiled_as_eager(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_code_is_the_same(name: str) -> None:
    compiled_as_eager(name, "inductor")


def moved(model: nn.Module, loss: Tensor) -> None:
    """Take one step, and check that it moves every parameter of every activation."""
    parameters = {
        f"{site}.{key}": value
        for site, module in activation_modules(model).items()
        for key, value in module.named_parameters()
    }
    before = {key: value.detach().clone() for key, value in parameters.items()}
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all((value != before[key]).any() for key, value in parameters.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_a_language_model_moves_every_parameter(name: str) -> None:
    shape = TransformerShape(
        vocab_size=16, context=8, width=16, layers=2, heads=2, ffn_hidden=24, activation=name
    )
    model = Transformer(shape)
    tokens = torch.randint(16, (2, 8))
    loss = model(tokens, tokens).total
    assert loss.isfinite()
    moved(model, loss)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", [n for n in UNGATED if n != "moa"])
def test_a_step_of_a_resnet_moves_every_parameter(name: str) -> None:
    # By default the last norm of a block starts at 0, and nothing in the block gets a gradient.
    model = timm.create_model("test_resnet", num_classes=4, zero_init_last=False)
    swap_activations(model, name, inputs=torch.randn(1, 3, 32, 32))
    sites = activation_modules(model)
    assert sites
    if name in OVER_A_DIM:
        assert {site.dim for site in sites.values()} == {1}
    loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4))
    assert loss.isfinite()
    moved(model, loss)
