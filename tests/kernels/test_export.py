"""Exported programs: plain operations only, whatever the backend of the machine that exports."""

from __future__ import annotations

import pytest
import torch
from polyvision.kernels.reference import row_scale

from polyvision import PolyCom, PolyNorm, PolyNorm2d, PolyPReLU, PolyReLU, PolyReLUNorm

ROWS = ({0: torch.export.Dim("rows", min=2)},)


def trained(make, **keywords):
    module = make(**keywords).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [PolyNorm, PolyPReLU])
def test_export_holds_plain_operations_only(make, strict):
    module, x = trained(make), torch.randn(4, 16)
    program = torch.export.export(module, (x,), dynamic_shapes=ROWS, strict=strict)
    assert "polyvision" not in program.graph_module.code
    other = torch.randn(9, 16)
    torch.testing.assert_close(program.module()(other), module(other))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the checks of shapes
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("make", "keywords"),
    [(PolyNorm, {}), (PolyReLU, {}), (PolyCom, {"rho": torch.tanh}), (PolyCom, {"rho": "prelu"})],
)
def test_trace_holds_plain_operations_only(make, keywords):
    module, x = trained(make, **keywords), torch.randn(4, 16)
    traced = torch.jit.trace(module, x)
    assert "polyvision::" not in str(traced.inlined_graph)  # an operation of ours
    assert "^_" not in str(traced.inlined_graph)  # a function of Python
    torch.testing.assert_close(traced(2 * x), module(2 * x))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (PolyNorm, (4, 16)),
        pytest.param(PolyNorm2d, (4, 8, 3, 3), marks=pytest.mark.slow),
        pytest.param(PolyReLUNorm, (4, 16), marks=pytest.mark.slow),
        pytest.param(PolyReLU, (4, 16), marks=pytest.mark.slow),
        pytest.param(PolyPReLU, (4, 16), marks=pytest.mark.slow),
        pytest.param(PolyCom, (4, 16), marks=pytest.mark.slow),
    ],
)
def test_onnx_computes_the_same(make, shape):
    pytest.importorskip("onnxscript", reason="needs the packages onnx and onnxscript")
    from onnx.reference import ReferenceEvaluator

    module = trained(make)
    program = torch.onnx.export(
        module, (torch.randn(shape),), dynamo=True, dynamic_shapes=ROWS, verbose=False
    )
    assert {node.domain for node in program.model_proto.graph.node} == {""}  # standard operations
    run = ReferenceEvaluator(program.model_proto)
    (name,) = run.input_names
    normalises = isinstance(module, PolyNorm)
    for scale in (1.0, 1e-3, 1e30) if normalises else (1.0, 1e-3):
        x = torch.randn(7, *shape[1:]) * scale
        (y,) = run.run(None, {name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_are_scaled_by_powers_of_two_near_their_maximum(dtype):
    """Also where the logarithm rounds over an integer, and at the largest numbers."""
    exponents = torch.arange(128 if dtype == torch.float32 else 1024)
    powers = torch.ldexp(torch.ones_like(exponents, dtype=dtype), exponents)
    below, above = powers.nextafter(powers / 2), powers.nextafter(2 * powers)
    peak = torch.cat([powers, below, above, torch.tensor([torch.finfo(dtype).max], dtype=dtype)])
    scale = row_scale(torch.stack([peak, -peak / 3], 1), 1)[:, 0]
    assert (torch.frexp(scale).mantissa == 0.5).all()
    ratio = peak / scale
    assert bool(((ratio >= 0.5) & (ratio < 4)).all())
    small = row_scale(torch.tensor([[0.3, -1e-30], [0.0, 0.0]], dtype=dtype), 1)
    assert (small == 1).all()
