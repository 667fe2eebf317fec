"""``formula``: what it computes, what it refuses, and that it is an activation like all others."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from malformed import MALFORMED
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from polyvision import PolyvisionError, create_activation, swap_activations
from polyvision.activations import activation_info, activation_modules
from polyvision.activations.base.expression import FUNCTIONS, read_expression
from polyvision.activations.formula import Formula, apply_formula
from polyvision.analysis.cost.saved_bytes import saved_bytes
from polyvision.models.weights.load import function_name

MISH = "x * tanh(softplus(b * x))"


def formula(f: str, **init: float) -> nn.Module:
    return create_activation("formula", f=f, init=init or None)


# What Python does, while the text of a formula is read: an audit hook can never be taken out again.
_READING: list[str] | None = None


def _audit(event: str, _: Any) -> None:
    if _READING is not None:
        _READING.append(event)


sys.addaudithook(_audit)


def happens_in(call: Callable[[], Any]) -> set[str]:
    """Return the names of the audit events that Python raises in a call."""
    global _READING
    _READING = []
    try:
        call()
    except PolyvisionError:
        pass
    finally:
        events, _READING = _READING, None
    return set(events)


@pytest.mark.parametrize("text", [text for text, *_ in MALFORMED])
def test_nothing_of_a_formula_is_run(text: str) -> None:
    read_expression.cache_clear()
    events = happens_in(lambda: read_expression(text))
    assert events <= {"compile", "object.__getattr__"}  # `compile` is that of ast.parse


def test_running_a_text_would_be_noticed() -> None:
    assert "exec" in happens_in(lambda: eval("1 + 1"))


@pytest.mark.parametrize(("text", "column", "said"), MALFORMED)
def test_a_mistake_is_refused_with_its_column(text: str, column: int, said: str) -> None:
    init = {"b": 1.0} if "b" in [*text.replace("(", " ").replace(")", " ").split()] else None
    with pytest.raises(PolyvisionError) as error:
        Formula(f=text, init=init)
    message = str(error.value)
    assert f", column {column}: " in message
    assert said in message.split(f", column {column}: ")[1]
    assert "\n" not in message


# Each function beside a formula of its own, in float64.
ORACLES: dict[str, Any] = {
    "abs(x)": lambda x: torch.where(x < 0, -x, x),
    "sign(x) * x": lambda x: torch.where(x < 0, -x, x),
    "square(x)": lambda x: x * x,
    "sqrt(x**2 + 1)": lambda x: (x * x + 1) ** 0.5,
    "rsqrt(x**2 + 1)": lambda x: (x * x + 1) ** -0.5,
    "exp(x)": lambda x: math.e**x,
    "expm1(x)": lambda x: torch.exp(x) - 1,
    "log(x**2 + 1)": lambda x: torch.log2(x * x + 1) * math.log(2),
    "log1p(x**2)": lambda x: torch.log2(x * x + 1) * math.log(2),
    "sin(pi * x)": lambda x: torch.cos(math.pi * (x - 0.5)),
    "cos(x)": lambda x: torch.sin(x + math.pi / 2),
    "atan(x)": lambda x: torch.atan2(x, torch.ones_like(x)),
    "sinh(x)": lambda x: (torch.exp(x) - torch.exp(-x)) / 2,
    "cosh(x)": lambda x: (torch.exp(x) + torch.exp(-x)) / 2,
    "tanh(x)": lambda x: 1 - 2 / (torch.exp(2 * x) + 1),
    "asinh(x)": lambda x: torch.log(x + (x * x + 1).sqrt()),
    "erf(x)": lambda x: 1 - torch.special.erfc(x),
    "erfc(x)": lambda x: 1 - torch.special.erf(x),
    "sigmoid(x)": lambda x: 1 / (1 + torch.exp(-x)),
    "logsigmoid(x)": lambda x: -torch.log(1 + torch.exp(-x)),
    "softplus(x)": lambda x: torch.log(1 + torch.exp(x)),
    "relu(x)": lambda x: (x > 0) * x,
    "gelu(x)": lambda x: x * (1 + torch.special.erf(x / 2**0.5)) / 2,
    "silu(x)": lambda x: x / (1 + torch.exp(-x)),
    "mish(x)": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
    "max(x, 0.1 * x)": lambda x: torch.where(x > 0, x, 0.1 * x),
    "min(0.3, x)": lambda x: torch.where(x > 0.3, 0.3, x),
    "clamp(x, -1, 1.5)": lambda x: torch.where(x < -1, -1.0, torch.where(x > 1.5, 1.5, x)),
    "where(x >= 0.1, x, x / 10)": lambda x: torch.where(x >= 0.1, x, x / 10),
    "where(x < 0.1, 0.1, x)": lambda x: torch.where(x < 0.1, 0.1, x),
    "mean(x) * x": lambda x: x * x.sum(-1, keepdim=True) / x.shape[-1],
    "x / rms(x)": lambda x: x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6) ** 0.5,
    "-x ** 2 + +x - 2 / e": lambda x: -(x * x) + x - 2 / math.e,
    "2 ** x - (3 - 1) ** 2": lambda x: torch.exp2(x) - 4,
}


@pytest.mark.parametrize("text", ORACLES)
def test_value_and_gradient_against_float64(text: str) -> None:
    x = torch.linspace(-4, 4, 50, dtype=torch.float64).reshape(5, 10).requires_grad_()
    got, want = formula(text)(x), ORACLES[text](x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    upstream = torch.randn_like(x)
    torch.testing.assert_close(
        torch.autograd.grad(got, x, upstream)[0],
        torch.autograd.grad(want, x, upstream)[0],
        rtol=1e-10,
        atol=1e-12,
    )


def test_every_function_has_an_oracle() -> None:
    kinds = {node.kind for text in ORACLES for node in read_expression(text).nodes()}
    assert set(FUNCTIONS) <= kinds


def test_the_names_are_learned_from_their_initial_values() -> None:
    module = formula("a * x * sigmoid(b * x) + a", a=2.0, b=-0.5)
    assert {k: v.tolist() for k, v in module.named_parameters()} == {"a": [2.0], "b": [-0.5]}
    x = torch.randn(40, dtype=torch.float64, requires_grad=True)
    a, b = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (2.0, -0.5))
    want = a * x / (1 + torch.exp(-b * x)) + a
    upstream = torch.randn_like(x)
    module.double()(x).backward(upstream)
    dx, da, db = torch.autograd.grad(want, (x, a, b), upstream)
    for got, exact in ((x.grad, dx), (module.a.grad, da[None]), (module.b.grad, db[None])):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        module.a.add_(1)
    module.reset_parameters()
    assert module.a.item() == 2.0


def test_second_derivatives() -> None:
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    module = formula(MISH, b=0.7).double()
    assert torch.autograd.gradcheck(module, x)
    assert torch.autograd.gradgradcheck(module, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    x = (30 * torch.randn(4, 64)).to(dtype)
    module = formula("x**4 / (1 + x**4)")  # fp16 overflows at x = 16
    assert torch.equal(module(x), module(x.float()).to(dtype))
    assert module(x).isfinite().all()


def test_only_the_input_is_kept() -> None:
    module = formula("x * tanh(softplus(b * x)) + sin(x)**2", b=1.0)
    kept = saved_bytes(module, "fused", [(64, 64)], torch.bfloat16)
    assert kept == 64 * 64 * 2 + 4


def test_mean_and_rms_make_it_normalising() -> None:
    info = activation_info("formula")
    assert info.kind == info.kind_with({"f": MISH, "init": {"b": 1.0}}) == "pointwise"
    assert info.kind_with({"f": "b * x / rms(x)"}) == "normalising"
    x = torch.randn(2, 5, 4, 3)
    over_channels = create_activation("formula", f="x / rms(x) - mean(x)", dim=1)
    rows = x.movedim(1, -1)
    want = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() - rows.mean(-1, keepdim=True)
    torch.testing.assert_close(over_channels(x), want.movedim(-1, 1))
    assert not hasattr(formula(MISH, b=1.0), "dim")


def test_a_swap_gives_a_normalising_formula_the_dimension_of_its_site() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.ReLU())
    swap_activations(
        model, "formula", inputs=torch.randn(1, 3, 8, 8), f="b * x / rms(x)", init={"b": 2.0}
    )
    assert [module.dim for module in activation_modules(model).values()] == [1, -1]
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(m.b.grad is not None for m in activation_modules(model).values())


def test_a_value_for_each_channel() -> None:
    module = Formula(f="max(x, 0) + a * min(x, 0)", init={"a": 0.25}, num_parameters=3, dim=1)
    slopes = torch.tensor([0.1, 0.2, 0.3])
    with torch.no_grad():
        module.a.copy_(slopes)
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(module(x), F.prelu(x, slopes))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    options = {"f": "a * x", "init": {"a": 2.0}, "num_parameters": 4}
    swap_activations(model, "formula", inputs=torch.randn(1, 3, 8, 8), **options)
    assert (model[1].dim, model[1].a.shape) == (1, (4,))
    with pytest.raises(PolyvisionError, match="a has 3 channels, and x of shape"):
        module(torch.randn(2, 4, 5, 6))


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"f": MISH}, r"column 19: unknown name 'b'.* act.init.b=1.0"),
        ({"f": "beta * x", "init": {"bta": 1.0}}, r"unknown name 'beta'. Did you mean 'bta'"),
        ({"f": MISH, "init": {"b": 1, "c": 2}}, r"init.c: the formula .* has no such name"),
        ({"f": MISH, "init": {"b": math.nan}}, r"init.b must be a finite number, got nan"),
        ({"f": MISH, "init": {"b": "1"}}, r"init.b must be a finite number, got '1'"),
        ({"f": MISH, "init": {"b": True}}, r"init.b must be a finite number, got True"),
        ({"f": MISH, "init": {"b": 1e39}}, r"init.b must be a finite number, got 1e\+39"),
        ({"f": MISH, "init": {"b": 10**400}}, r"init.b must be a finite number"),
        ({"f": MISH, "init": [1.0]}, r"init must be a dict of numbers by name, got \[1.0\]"),
        (
            {"f": "x * function_name", "init": {"function_name": 1}},
            r"column 5: 'function_name' has a meaning",
        ),
        ({"f": "forward * x", "init": {"forward": 1}}, r"column 1: 'forward' has a meaning"),
        ({"f": "x * dim", "init": {"dim": 1}}, r"column 5: 'dim' has a meaning"),
        ({"f": "x * f", "init": {"f": 1}}, r"column 5: 'f' has a meaning"),
        ({"f": 3}, r"f must be text, got 3"),
        ({"dim": 1.0}, r"dim must be an integer"),
        ({"num_parameters": 0}, r"num_parameters must be a positive integer"),
        ({"dtype": torch.int32}, r"dtype must be a floating-point"),
    ],
)
def test_bad_arguments(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(PolyvisionError, match=said):
        Formula(**keywords)


def test_integers_are_refused() -> None:
    with pytest.raises(PolyvisionError, match=r"floating-point tensor, got torch\.int64"):
        apply_formula(torch.arange(3), "x * 2", {})


def test_layouts_scalars_and_fake_tensors() -> None:
    module = formula("b * relu(x)", b=2.0)
    assert module(torch.tensor(3.0)).shape == ()
    x = torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last)
    assert module(x).is_contiguous(memory_format=torch.channels_last)
    with FakeTensorMode():
        assert formula("c * x**2", c=3.0)(torch.empty(2, 3)).shape == (2, 3)
    with torch.device("meta"):
        assert formula("c * x**3", c=3.0)(torch.empty(2, 3)).is_meta
    with torch.inference_mode():
        assert formula("c * x**4", c=3.0)(torch.ones(2)).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_state(duplicate: Any) -> None:
    module = formula(MISH, b=0.3)
    twin = duplicate(module)
    x = torch.randn(9)
    assert torch.equal(twin(x), module(x))
    assert repr(twin) == repr(module) == "Formula('x * tanh(softplus(b * x))', b=0.3)"
    assert function_name(module) == "Formula(x*tanh(softplus(b*x)))"
    with pytest.raises(RuntimeError, match=r"are those of Formula\(x\*tanh"):
        formula("b * x", b=1.0).load_state_dict(module.state_dict())


def test_a_network_with_formulas_is_traced_compiled_and_exported() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), formula(MISH, b=0.5), nn.Linear(4, 4), formula("x / rms(x) + c", c=1.0)
    )
    x = torch.randn(3, 4)
    want = model(x)
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(pickle.loads(pickle.dumps(graph))(x), want)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(x), want)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    got: Tensor = compiled(x)
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    for ours, exact in zip(
        torch.autograd.grad(got, list(model.parameters()), upstream),
        torch.autograd.grad(want, list(model.parameters()), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact)
