"""The contract of every registered activation as a module: constructor, state, layout, copies."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
from typing import Any

import pytest
import torch
from activation_oracles import OVER_A_DIM, UNGATED, build, inputs, option_names

from polyvision import PolyNorm, PolyNorm2d, activation_names, create_activation
from polyvision.activations import activation_info

NAMES = activation_names()
POLYNOMIAL = [name for name in NAMES if "order" in option_names(name)]
NORMALISING = activation_names("normalising")


@pytest.mark.parametrize("name", UNGATED)
def test_inplace_is_taken_in_every_way_timm_passes_it_and_ignored(name: str) -> None:
    make = activation_info(name).factory
    x = torch.randn(4, 6)
    torch.manual_seed(1)
    before, want = x.clone(), make()(x.clone())
    for module in (make(), make(inplace=True), make(inplace=False), make(True)):
        torch.manual_seed(1)  # of what is drawn
        assert torch.equal(module(x), want)
        assert torch.equal(x, before)
        assert repr(module) == repr(make())


@pytest.mark.parametrize("name", POLYNOMIAL)
def test_everything_after_inplace_is_keyword_only(name: str) -> None:
    with pytest.raises(TypeError, match="positional"):
        activation_info(name).factory(False, 3)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_keywords_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"keyword of activation '{name}' 'ordr'"):
        create_activation(name, ordr=3)
    with pytest.raises(TypeError, match="ordr"):
        activation_info(name).factory(ordr=3)


BAD = {
    "order": [0, 9, -1, 3.0, "3", True, None],
    "eps": [0, 0.0, -1e-6, float("inf"), float("nan"), "1e-6", True, None],
    "dim": [1.5, "1", True, None],
    "bias": [1, 0, "yes", None],
    "dtype": [torch.int32, torch.complex64, torch.bool, "float32"],
}


@pytest.mark.parametrize(
    ("name", "keyword", "value"),
    [
        (name, keyword, value)
        for name in sorted({*POLYNOMIAL, *OVER_A_DIM})
        for keyword, values in BAD.items()
        if keyword in inspect.signature(activation_info(name).factory).parameters
        for value in values
    ],
)
def test_bad_values_raise_an_error_that_names_them(name: str, keyword: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{keyword} must be") as error:
        create_activation(name, **{keyword: value})
    assert activation_info(name).factory.__name__ in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("name", POLYNOMIAL)
def test_state_dict_keys_and_shapes(name: str) -> None:
    for order in (1, 3, 8):
        state = create_activation(name, order=order).state_dict()
        assert list(state)[:2] == ["weight", "bias"]
        assert state["weight"].shape == (order,)
        assert state["bias"].shape == (1,)
    assert "bias" not in create_activation(name, bias=False).state_dict()


ROOT_E, COSINE = math.exp(-0.5), 0.66232645879
PARAMETERS: dict[str, dict[str, list[float]]] = {
    "prelu": {"weight": [0.25]},
    "swish": {"beta": [1.0]},
    "swish_t": {"beta": [1.0]},
    "swish_t_b": {"beta": [1.0]},
    "swish_t_c": {"beta": [1.0]},
    "crrelu": {"eps": [0.01]},
    "sau": {"alpha": [0.15]},
    "salu": {"a": [1.0], "b": [1.0]},
    "xatlu": {"alpha": [0.0]},
    "xgelu": {"alpha": [0.0]},
    "xsilu": {"alpha": [0.0]},
    "snake": {"a": [1.0]},
    "tesla": {"a": [1.0, 0.0], "b": [0.0, 0.0]},
    "hermite": {"c": [ROOT_E * math.sqrt(5 / 6), ROOT_E, ROOT_E, ROOT_E]},
    "fourier": {
        "f0": [COSINE * math.sqrt(35 / 36)],
        "c": [COSINE] * 3,
        "g": [1.0, 2.0, 3.0],
        "phi": [math.pi / 4] * 3,
    },
    "tropical": {"c": [1.0] * 4},
    "pau": {
        "a": [0.029793, 0.618374, 2.323309, 3.051936, 1.485420, 0.251024],
        "b": [-1.141955, 4.393160, 0.871471, 0.347197],
    },
    "ash": {"alpha": [1.0], "z": [0.0]},
    "la": {"weight": [1.0] * 7},
    "normsilu": {"gain": [1.0]},
    "xatglu": {"alpha": [0.0]},
    "xgeglu": {"alpha": [0.0]},
    "xswiglu": {"alpha": [0.0]},
}


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(POLYNOMIAL)))
def test_number_and_initial_values_of_parameters(name: str) -> None:
    wanted = PARAMETERS.get(name, {})
    module = create_activation(name)
    assert {key: p.tolist() for key, p in module.named_parameters()} == {
        key: pytest.approx(values, rel=1e-5) for key, values in wanted.items()
    }
    assert list(module.state_dict()) == list(wanted)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(9.0)
    for key, parameter in module.named_parameters():
        module.reset_parameters()
        assert parameter.tolist() == pytest.approx(wanted[key], rel=1e-5)


def test_extra_repr_shows_what_the_function_depends_on() -> None:
    assert repr(PolyNorm(order=2, eps=1e-5)) == "PolyNorm(order=2, eps=1e-05, dim=-1)"
    assert repr(PolyNorm2d(bias=False)) == "PolyNorm2d(order=3, eps=1e-06, dim=1, bias=False)"
    for name in POLYNOMIAL:
        shown = repr(create_activation(name, order=4, bias=False))
        assert "order=4" in shown
        assert "bias=False" in shown
    for name in NORMALISING:
        assert "dim=2" in repr(create_activation(name, dim=2))
        if "eps" in option_names(name):
            assert "eps=0.25" in repr(create_activation(name, eps=0.25))


def test_polynorm2d_is_polynorm_over_channels() -> None:
    x = torch.randn(2, 5, 4, 3)
    rows = x.permute(0, 2, 3, 1)
    want = PolyNorm(order=2)(rows).permute(0, 3, 1, 2)
    assert torch.equal(PolyNorm2d(order=2)(x), PolyNorm(order=2, dim=1)(x))
    torch.testing.assert_close(PolyNorm2d(order=2)(x), want)
    assert PolyNorm2d().state_dict().keys() == PolyNorm().state_dict().keys()


# torch's own RReLU gives a contiguous output, whatever its input is.
@pytest.mark.parametrize("name", sorted(set(UNGATED) - {"rrelu"}))
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_memory_format_is_kept(name: str, layout: torch.memory_format) -> None:
    module = build(name, **({"dim": 1} if name in NORMALISING else {}))
    x = torch.randn(2, 6, 4, 4).to(memory_format=layout).requires_grad_()
    y = module(x)
    assert y.is_contiguous(memory_format=layout)
    y.backward(torch.randn(2, 6, 4, 4).to(memory_format=layout))
    assert x.grad.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_and_incoming_gradients_are_never_modified(name: str) -> None:
    xs = inputs(name, 4, 6, dtype=torch.float32)
    upstream = torch.randn(4, 6)
    before = [t.detach().clone() for t in (*xs, upstream)]
    build(name)(*xs).backward(upstream)
    for tensor, old in zip((*xs, upstream), before, strict=True):
        assert torch.equal(tensor, old)
        assert tensor is upstream or tensor.grad is not None


@pytest.mark.parametrize("name", NAMES)
def test_meta_device(name: str) -> None:
    with torch.device("meta"):
        module = create_activation(name)
        y = module(*(torch.empty(2, 3, dtype=torch.bfloat16) for _ in inputs(name, 1)))
    assert all(p.is_meta for p in module.parameters())
    assert (y.device.type, y.shape, y.dtype) == ("meta", (2, 3), torch.bfloat16)


@pytest.mark.parametrize("name", [n for n in NAMES if create_activation(n).state_dict()])
def test_device_and_dtype_keywords_place_the_coefficients(name: str) -> None:
    module = create_activation(name, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    module.to_empty(device="cpu").reset_parameters()
    fresh = create_activation(name, dtype=torch.bfloat16)
    for ours, theirs in zip(module.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("coefficients", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", POLYNOMIAL)
def test_output_has_the_dtype_of_the_input(name: str, coefficients: torch.dtype) -> None:
    module = create_activation(name, dtype=coefficients)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        xs = inputs(name, 3, 8, dtype=dtype)
        y = module(*xs)
        assert y.dtype == dtype
        y.sum().backward()
        assert {x.grad.dtype for x in xs} == {dtype}
        assert module.weight.grad.dtype == coefficients


def saved_and_loaded(module: torch.nn.Module) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh = copy.deepcopy(module)
    for parameter in fresh.parameters():
        torch.nn.init.zeros_(parameter)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    return fresh


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded],
    ids=["deepcopy", "pickle", "state_dict"],
)
@pytest.mark.parametrize("name", NAMES)
def test_copies_compute_the_same_and_share_nothing(name: str, duplicate: Any) -> None:
    module = build(name)
    twin = duplicate(module)
    xs = inputs(name, 4, 6, dtype=torch.float32)
    assert torch.equal(module(*xs), twin(*xs))
    assert repr(module) == repr(twin)
    pointers = {p.data_ptr() for p in module.parameters()}
    assert pointers.isdisjoint(p.data_ptr() for p in twin.parameters())


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and notes the checks of shapes
def test_torchscript_is_as_the_docs_say() -> None:
    x = torch.randn(2, 6)
    for name in ("relu", "gelu", "silu"):
        assert torch.equal(torch.jit.script(create_activation(name))(x), create_activation(name)(x))
    for name in ("polynorm", "polyrelu", "polyrelunorm", "polyprelu"):
        module = build(name)
        with pytest.raises(torch.jit.frontend.NotSupportedError, match="keyword-only arguments"):
            torch.jit.script(module)
        torch.testing.assert_close(torch.jit.trace(module, x)(2 * x), module(2 * x))
