"""PolyCom with a base from Python: a function, a module, and what is neither."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from polyvision import PolyCom, functional
from polyvision.activations import activation_info


def bump(x: Tensor) -> Tensor:
    return torch.exp(-x.square())


class Swish(nn.Module):
    """A module with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


BASES = {
    "function": bump,
    "of torch": torch.tanh,
    "partial": functools.partial(torch.clamp, min=-0.5),
    "module": Swish(),
}


def make(rho: Any, kind: str = "I") -> PolyCom:
    module = PolyCom(rho=copy.deepcopy(rho), kind=kind)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.7, -1.3, 0.45]))
        module.bias.fill_(0.3)
    return module


@pytest.mark.parametrize("kind", ["I", "II"])
@pytest.mark.parametrize("base", BASES)
def test_value_and_gradients_follow_the_formula(base: str, kind: str) -> None:
    module = make(BASES[base], kind).double()
    x = torch.randn(5, 7, dtype=torch.double, requires_grad=True)
    rho, (a, b, c) = module.rho, module.weight
    if kind == "I":
        exact = a * rho(x) + b * rho(x) ** 2 + c * rho(x) ** 3 + module.bias
    else:
        exact = a * rho(x) + b * rho(x**2) + c * rho(x**3) + module.bias
    variables = [x, *module.parameters()]
    assert len(variables) == 3 + isinstance(rho, Swish)
    torch.testing.assert_close(module(x), exact)
    found = torch.autograd.grad(module(x).square().sum(), variables)
    torch.testing.assert_close(found, torch.autograd.grad(exact.square().sum(), variables))


@pytest.mark.parametrize("base", BASES)
def test_copies_and_state(base: str) -> None:
    module, x = make(BASES[base]), torch.randn(4, 6)
    expected = {"weight", "bias"} | ({"rho.beta"} if base == "module" else set())
    assert set(module.state_dict()) == expected
    fresh = PolyCom(rho=copy.deepcopy(BASES[base]))
    fresh.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert torch.equal(other(x), module(x))
        assert repr(other) == repr(module)


def test_the_compiler_sees_through_it() -> None:
    torch._dynamo.reset()
    module, x = make(bump), torch.randn(4, 6)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), module(x))


def test_repr_names_the_base() -> None:
    assert repr(make(bump)) == "PolyCom(rho=bump, kind='I', order=3)"
    assert "(rho): Swish()" in repr(make(Swish()))


def test_a_configuration_is_offered_names_only() -> None:
    options = activation_info("polycom").options
    assert {field.name: field.type for field in options.__dataclass_fields__.values()} == {
        "rho": str,
        "kind": str,
        "order": int,
        "bias": bool,
        "init": Literal["equal", "base"],
    }


@pytest.mark.parametrize(
    ("rho", "text"),
    [
        (Swish, r"got the class Swish; pass an instance: rho=Swish\(\)"),
        (None, "function or module of one tensor, or one of .*gelu, .*, got None"),
        (3, "got 3"),
        ("tahn", "unknown base .rho. of PolyCom 'tahn'.*'tanh'.*Valid: .*gelu, "),
        ("polynorm", "unknown base .rho. of PolyCom 'polynorm'"),
    ],
)
def test_what_is_no_base_is_refused(rho: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PolyCom(rho=rho)


def test_the_function_refuses_a_name() -> None:
    with pytest.raises(ValueError, match="polycom: rho must be a function of one tensor, got 'si"):
        functional.polycom(torch.ones(2), torch.ones(1), rho="silu")  # type: ignore[arg-type]


NAMED: dict[str, tuple[Any, int]] = {  # formula, number of parameters of the base
    "identity": (lambda m, x: x, 0),
    "sigmoid": (lambda m, x: 1 / (1 + torch.exp(-x)), 0),
    "prelu": (lambda m, x: torch.where(x > 0, x, m.rho.weight.to(x.dtype) * x), 1),
    "relu": (lambda m, x: torch.where(x > 0, x, 0.0 * x), 0),
}


@pytest.mark.parametrize("kind", ["I", "II"])
@pytest.mark.parametrize("name", NAMED)
def test_bases_by_name(name: str, kind: str) -> None:
    formula, parameters = NAMED[name]
    module = PolyCom(rho=name, kind=kind).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.7, -1.3, 0.45]))
        module.bias.fill_(0.3)
    x = torch.randn(5, 7, dtype=torch.double, requires_grad=True)
    powers = [formula(module, x) ** i if kind == "I" else formula(module, x**i) for i in (1, 2, 3)]
    exact = sum(a * p for a, p in zip(module.weight, powers, strict=True)) + module.bias
    variables = [x, *module.parameters()]
    assert len(variables) == 3 + parameters
    torch.testing.assert_close(module(x), exact)
    found = torch.autograd.grad(module(x).square().sum(), variables)
    torch.testing.assert_close(found, torch.autograd.grad(exact.square().sum(), variables))


@pytest.mark.parametrize("name", NAMED)
def test_a_named_base_takes_every_dtype(name: str) -> None:
    for coefficients in (torch.float32, torch.bfloat16):
        module = PolyCom(rho=name, dtype=coefficients)
        assert {p.dtype for p in module.parameters()} == {coefficients}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert module(torch.randn(3, 4, dtype=dtype)).dtype == dtype


def test_parameters_of_the_base_are_reset_too() -> None:
    module = PolyCom(rho="prelu", device="meta").to_empty(device="cpu")
    nn.init.constant_(module.rho.weight, 9.0)
    module.reset_parameters()
    assert module.rho.weight.tolist() == [0.25]
    assert module.weight.tolist() == PolyCom().weight.tolist()


def test_an_unknown_base_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'sigmoyd'. Did you mean 'sigmoid'.*identity.*prelu"):
        PolyCom(rho="sigmoyd")
