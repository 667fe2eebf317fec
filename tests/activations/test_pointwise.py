"""Pointwise functions from one formula: gradients, what is kept, channels, tools of torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from activation_oracles import ORACLES, build
from torch import Tensor, nn

from polyvision import swap_activations
from polyvision.activations import (
    Pointwise,
    PolyPReLU,
    PReLU,
    Swish,
    activation_info,
    activation_names,
    create_activation,
    learned,
)
from polyvision.activations.base.pointwise import Stepped
from polyvision.analysis.cost.saved_bytes import SavedTensors
from polyvision.errors import PolyvisionError
from polyvision.models.language.ffn import FeedForward

NAMES = [n for n in activation_names("pointwise") if isinstance(create_activation(n), Pointwise)]
STEPPED = [n for n in NAMES if isinstance(create_activation(n), Stepped)]
LEARNED = [n for n in NAMES if list(create_activation(n).parameters())]
SURROGATE = ["helu", "regelu2", "resilu2", "sugar_bsilu"]
UNCONVERTED = [n for n in NAMES if n not in SURROGATE]  # the derivative is that of the function

# Where a function or its slope jumps, and where it is steepest.
KINKS = {0.0, -0.05, 0.01, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0, 50**0.5}
KINKS |= {-3.18588100, -0.00117882, 3.19083261, -6.30504610, -0.00086849, 6.32581524, 5e-5}


def fifty_points() -> Tensor:
    """Kinks from both sides, close to them, and large values."""
    near = [s * k + e for k in sorted(KINKS) for s, e in ((1, 1e-9), (-1, -1e-9))]
    far = [s * v for v in (0.3, 1.7, 4.2, 11.0, 35.0, 100.0, 1e3, 1e4) for s in (1, -1)]
    points = torch.tensor([*near, *far], dtype=torch.float64)
    assert len(points) >= 50
    return points


@pytest.mark.parametrize("name", activation_names("pointwise"))
def test_values_and_slopes_near_kinks_and_far_out(name: str) -> None:
    module = create_activation(name).double()
    x = fifty_points()
    if name == "golu":
        x = x[x > -35]  # below, the formula as printed is 0 times infinity
    x = x.requires_grad_()
    variables = [x, *module.parameters()]
    got, want = module(x), ORACLES[name](module, x)
    size = want.detach().abs().clamp(min=1)
    assert ((got - want).abs() <= 1e-9 * size).all()
    slopes, exact = (torch.autograd.grad(y.sum(), variables) for y in (got, want))
    # A sine of 300,000 has lost 5 of its 16 digits.
    for ours, theirs in zip(slopes, exact, strict=True):
        assert ((ours - theirs).abs() <= 1e-8 * theirs.abs().clamp(min=1)).all()


@pytest.mark.parametrize("name", UNCONVERTED)
def test_gradcheck(name: str) -> None:
    module = build(name).double()
    points = [-4.3, -2.6, -1.31, -0.83, -0.27, 0.16, 0.44, 0.86, 1.37, 2.63, 5.4]
    x = torch.tensor(points, dtype=torch.float64).requires_grad_()
    variables = [x, *module.parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        result: Tensor = torch.func.functional_call(module, named, (x,))
        return result

    assert torch.autograd.gradcheck(function, variables)
    assert torch.autograd.gradgradcheck(function, variables)


# The largest |x| with finite values: of fp16 where the value overflows, of bf16 also where a power
# or a frequency does. None for every finite x.
LIMITS: dict[str, tuple[float | None, float | None]] = {
    "la": (240, 1e19),
    "relu2": (255, 1e19),
    "repu": (40, 1e12),
    "monomial": (255, 1e19),
    "poly": (57, 1e12),
    "polycom": (57, 1e12),
    "polyrelu": (57, 1e12),
    "polyprelu": (57, 1e12),
    "hermite": (80, 1e12),
    "pau": (None, 1e7),
    "salu": (None, 1e18),
    "tropical": (46000, 1e38),
    "siren": (None, 1e36),
    "tesla": (None, 1e38),
    "fourier": (None, 1e38),
    "gelu_tanh": (None, 1e12),
    "selu": (62000, 1e38),
    "gelu": (None, 1e18),
    "regelu2": (None, 1e18),
    "hardswish": (None, 5e37),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", activation_names("pointwise"))
def test_low_precision_is_finite_in_the_stated_range(name: str, dtype: torch.dtype) -> None:
    module = create_activation(name)
    fp16, bf16 = LIMITS.get(name, (None, None))
    limit = (fp16 if dtype == torch.float16 else bf16) or torch.finfo(dtype).max
    steps = [0.0, 1e-7, 1e-3, 0.1, 0.3, 0.7, 1.0]
    x = torch.tensor([s * limit for p in steps for s in (p, -p)] + [1.0, -1.0, 8.0, -8.0])
    x = x.to(dtype).clamp(-limit, limit).requires_grad_()
    y = module(x)
    assert y.isfinite().all()
    y.backward(torch.ones_like(y))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_only_the_input_is_kept_or_a_few_bits(name: str) -> None:
    x = torch.randn(64, 128, requires_grad=True)
    module = create_activation(name)
    with SavedTensors() as saved:
        module(x)
    kept = saved.bytes_without(module.parameters())
    assert kept == (x.numel() * 4 if name not in STEPPED else x.numel() * bits(module) // 8)


def bits(module: Any) -> int:
    thresholds = len(type(module).steps(**module._given).at)
    return {1: 1, 2: 2, 3: 2}[thresholds]


def test_bits_of_the_surrogates() -> None:
    kept = {name: bits(create_activation(name)) for name in STEPPED}
    assert kept == {
        "helu": 1,
        "regelu2": 2,
        "resilu2": 2,
        "trrelu": 2,
        "shifted_relu": 1,
        "clipped_srelu": 2,
        "fatrelu": 1,
    }


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5, 7), (2, 3, 4, 5)])
@pytest.mark.parametrize("name", ["helu", "regelu2", "swish", "pau", "prelu"])
def test_every_shape(name: str, shape: tuple[int, ...]) -> None:
    module = build(name).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    got, want = module(x), ORACLES[name](module, x.reshape(-1)).reshape(shape)
    assert got.shape == x.shape
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    found = torch.autograd.grad(got, x, upstream)
    torch.testing.assert_close(found, torch.autograd.grad(want, x, upstream))


@pytest.mark.parametrize("name", STEPPED)
def test_a_threshold_is_compared_in_fp32(name: str) -> None:
    module = create_activation(name)
    steps = type(module).steps(**module._given)
    near = torch.tensor([t + e for t in steps.at for e in (-0.2, 0.0, 0.2)])
    for dtype in (torch.float16, torch.bfloat16):
        x = near.to(dtype).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).sum(), x)
        want = sum(j * (x.double() > t) for t, j in zip(steps.at, steps.jumps, strict=True))
        torch.testing.assert_close(slope.double(), (want + steps.base).to(dtype).double())


@pytest.mark.parametrize("name", SURROGATE)
def test_plain_operations_give_the_same_surrogate(name: str) -> None:
    """Where the compiler or a transform watches, value and derivative are the same."""
    module = create_activation(name)
    x = torch.linspace(-8, 8, 101)
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    (slope,) = torch.autograd.grad(y.sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: module(x).sum())(x), slope)
    assert torch.equal(torch.func.vmap(module)(x), y)


# Parameters for each channel.


@pytest.mark.parametrize("dim", [1, -1, 0, -3])
@pytest.mark.parametrize("name", LEARNED)
def test_each_channel_has_its_own_parameters(name: str, dim: int) -> None:
    x = torch.randn(4, 4, 4, dtype=torch.float64, requires_grad=True)
    keywords = {"num_parameters": 4, "dim": dim, "dtype": torch.float64}
    module = create_activation(name, **keywords)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 0.2 * torch.rand_like(parameter)).add_(0.1)
    single = create_activation(name, dtype=torch.float64)
    y = module(x)
    upstream = torch.randn_like(y)
    for channel in range(4):
        for ours, theirs in zip(single.parameters(), module.parameters(), strict=True):
            ours.data = theirs.data[..., channel : channel + 1].reshape(ours.shape).clone()
        torch.testing.assert_close(single(x.select(dim, channel)), y.select(dim, channel))
    found = torch.autograd.grad(y, list(module.parameters()), upstream)
    for ours, theirs in zip(single.parameters(), found, strict=True):
        (last,) = torch.autograd.grad(
            single(x.select(dim, 3)), ours, upstream.select(dim, 3), retain_graph=True
        )
        torch.testing.assert_close(theirs[..., 3], last.reshape(theirs[..., 3].shape))


def test_prelu_is_that_of_torch() -> None:
    x = torch.randn(2, 5, 3, 3)
    for count in (1, 5):
        theirs = nn.PReLU(count)
        nn.init.uniform_(theirs.weight)
        ours = PReLU(num_parameters=count)
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dim", [1, -1])
def test_polyprelu_has_a_slope_for_each_channel(dim: int) -> None:
    module = PolyPReLU(num_parameters=4, dim=dim, bias=False)
    assert module.slope.tolist() == [0.25] * 4
    nn.init.uniform_(module.slope)
    x = torch.randn(3, 4, 4)
    slope = module.slope.view(4, 1) if dim == 1 else module.slope
    base = torch.where(x > 0, x, slope * x)
    want = sum(w * base**i for i, w in enumerate(module.weight, 1))
    torch.testing.assert_close(module(x), want)
    assert repr(module) == f"PolyPReLU(order=3, bias=False, num_parameters=4, dim={dim})"
    for keyword, value in (("num_parameters", 0), ("dim", 1.5)):
        with pytest.raises(PolyvisionError, match=f"PolyPReLU: {keyword} must be"):
            PolyPReLU(**{keyword: value})


def test_the_place_sets_the_dimension_of_the_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU())
    swap_activations(model, "prelu", inputs=torch.randn(2, 3, 9, 9), num_parameters=6)
    assert repr(model[1]) == "PReLU(weight=0.25, num_parameters=6, dim=1)"
    ffn = FeedForward(4, 6, "swish", {"num_parameters": 6})
    assert repr(ffn.activation) == "Swish(beta=1.0, num_parameters=6, dim=-1)"
    ffn(torch.randn(2, 3, 4)).sum().backward()
    assert ffn.activation.beta.grad.shape == (6,)


@pytest.mark.parametrize("name", LEARNED)
def test_a_training_step_moves_every_parameter(name: str) -> None:
    model = nn.Sequential(nn.Linear(5, 16), create_activation(name), nn.Linear(16, 3))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(2 * torch.randn(32, 5)).square().mean().backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        if name == "tropical" and key == "1.c":  # the maximum gives each x to one piece
            assert (parameter != before[key]).any()
        else:
            assert (parameter != before[key]).all(), key


def test_what_does_not_fit_is_refused() -> None:
    text = r"Swish: num_parameters=3 needs as many channels in dim 1, got x of shape \(2, 4\)"
    with pytest.raises(PolyvisionError, match=text):
        Swish(num_parameters=3)(torch.ones(2, 4))
    for name, keyword, value, wanted in [
        ("swish", "beta", "1", "a finite number"),
        ("swish", "beta", float("nan"), "a finite number"),
        ("swish", "beta", 1e39, "a finite number"),  # infinite in fp32
        ("swish", "beta", 10**400, "a finite number"),
        ("swish", "num_parameters", 0, "a positive integer"),
        ("swish", "trainable", 1, "True or False"),
        ("swish", "dim", True, "an integer"),
        ("swish", "dtype", torch.int32, "a floating-point torch.dtype"),
        ("smelu", "beta", 0, "a finite number greater than 0"),
        ("salu", "b", -1.0, "a finite number greater than 0"),
        ("repu", "k", 0, "an integer from 1 to 64"),
        ("hermite", "degree", 2.0, "an integer from 1 to 64"),
    ]:
        cls = activation_info(name).factory.__name__
        with pytest.raises(PolyvisionError, match=f"{cls}: {keyword} must be {wanted}, got"):
            create_activation(name, **{keyword: value})
    with pytest.raises(PolyvisionError, match=r"unknown form of PAU 'Z'\. Valid: A, B"):
        create_activation("pau", form="Z")
    with pytest.raises(PolyvisionError, match="num_parameters must be 1 where nothing is learned"):
        Swish(trainable=False, num_parameters=4)


def test_parameters_can_be_fixed_or_learned() -> None:
    x = torch.randn(3, 4)
    fixed = Swish(beta=1.7, trainable=False)
    assert not list(fixed.parameters())
    assert torch.equal(fixed(x), Swish(beta=1.7)(x))
    assert repr(fixed) == "Swish(beta=1.7, trainable=False)"
    assert len(list(create_activation("aptx", trainable=True).parameters())) == 3
    assert not list(create_activation("aptx").parameters())


def test_parameters_load_only_into_their_own_function() -> None:
    with pytest.raises(RuntimeError, match=r"is SwishT, and its coefficients .* those of Swish"):
        create_activation("swish_t").load_state_dict(Swish().state_dict())


class Wavy(Pointwise):
    @staticmethod
    def formula(x: Tensor, *, a: Tensor = learned(0.5), shift: float = 2.0) -> Tensor:
        return x + a * torch.sin(x + shift)


def test_a_class_of_a_user_is_its_formula() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    module = Wavy(a=0.25)
    torch.testing.assert_close(module(x), (x.float() + 0.25 * (x.float() + 2).sin()).bfloat16())
    assert repr(module) == "Wavy(a=0.25, shift=2.0)"
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'b'"):
        Wavy(b=1.0)


# The compiler and exports: a few here, all of them among the slow tests.

FEW = ["swish", "pau", "helu", "regelu2"]
ALL = [pytest.param(n, marks=[] if n in FEW else [pytest.mark.slow]) for n in NAMES]


@pytest.mark.parametrize("name", ALL)
def test_compiled_it_is_the_same(name: str) -> None:
    torch._dynamo.reset()
    module = build(name)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for shape in ((4, 6), (3, 6)):
        x = torch.randn(shape, requires_grad=True)
        variables = [x, *module.parameters()]
        got, want = compiled(x), module(x)
        torch.testing.assert_close(got, want)
        upstream = torch.randn_like(want)
        torch.testing.assert_close(
            torch.autograd.grad(got, variables, upstream),
            torch.autograd.grad(want, variables, upstream),
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_inductor_agrees(name: str) -> None:
    torch._dynamo.reset()
    module, x = build(name), torch.randn(4, 6, requires_grad=True)
    got, want = torch.compile(module, fullgraph=True)(x), module(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(got.sum(), [x, *module.parameters()]),
        torch.autograd.grad(want.sum(), [x, *module.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_exported_it_is_the_same(name: str) -> None:
    module, x = build(name).eval(), torch.randn(4, 6)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))


@pytest.mark.parametrize("name", ["swish", "prelu", "sau", "helu"])
def test_under_autocast_the_arithmetic_is_the_same(name: str) -> None:
    module, x = build(name), torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)
    want = module(x)
    (plain,) = torch.autograd.grad(want.sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x)
    assert torch.equal(got, want)
    (found,) = torch.autograd.grad(got.sum(), x)
    assert torch.equal(found, plain)
