"""What the public functions refuse: one text that names the argument, its value and what fits."""

from __future__ import annotations

import pytest
import torch

from polyvision import functional as F
from polyvision import kernels

X = torch.randn(4, 16)
W = torch.tensor([0.5, -0.3, 0.2])
INTEGERS = torch.tensor([1, 2, 3])
GROUPS = torch.tensor([0, 1, 1, 0])


def _elsewhere(tensor):
    return tensor.to("meta")


REFUSED = {
    "x of integers": (lambda: F.poly_norm(INTEGERS, W), r"x must be floating.*int64"),
    "x of no dimension": (lambda: F.poly_norm(torch.tensor(1.0), W), r"dim=-1 does not exist"),
    "dim": (lambda: F.poly_norm(X, W, dim=2), r"dim=2 does not exist.*\(4, 16\)"),
    "eps of zero": (lambda: F.poly_norm(X, W, eps=0.0), r"eps must be.*greater than 0, got 0"),
    "order of zero": (lambda: F.poly_norm(X, W[:0]), r"order 1 to 8, got \(0,\)"),
    "order of nine": (lambda: F.poly_relu(X, torch.ones(9)), r"order 1 to 8, got \(9,\)"),
    "bias": (
        lambda: F.poly_norm(X, W, torch.tensor(1.0)),
        r"bias must have shape \(1,\), got \(\)",
    ),
    "mul": (lambda: F.poly_norm(X, W, mul=X[:, :1]), r"mul must have.*\(4, 16\), got \(4, 1\)"),
    "slope": (lambda: F.poly_relu(X, W, slope=W), r"slope must have.*\(16\), got shape \(3,\)"),
    "group": (lambda: F.poly_norm(X, W[None], group=GROUPS[:3]), r"shape \(4,\).*of shape \(3,\)"),
    "group of floats": (lambda: F.poly_norm(X, W[None], group=X[:, 0]), r"int32 or int64.*float32"),
    "weight of integers": (lambda: F.poly_norm(X, INTEGERS), r"weight must be float32.*int64"),
    "bias of integers": (lambda: F.poly_relu(X, W, INTEGERS[:1]), r"bias must be float32.*int64"),
    "slope of integers": (
        lambda: F.poly_relu(X, W, slope=INTEGERS[:1]),
        r"slope must be float32.*int64",
    ),
    "weight elsewhere": (lambda: F.poly_norm(X, _elsewhere(W)), r"weight is on meta, x on cpu"),
    "bias elsewhere": (lambda: F.poly_relu(X, W, _elsewhere(W[:1])), r"bias is on meta, x on cpu"),
    "mul elsewhere": (lambda: F.poly_norm(X, W, mul=_elsewhere(X)), r"mul is on meta, x on cpu"),
    "slope elsewhere": (
        lambda: F.poly_relu(X, W, slope=_elsewhere(W[:1])),
        r"slope is on meta, x on cpu",
    ),
    "group elsewhere": (
        lambda: F.poly_relu_norm(X, W[None], group=_elsewhere(GROUPS)),
        r"group is on meta, x on cpu",
    ),
    "kind": (lambda: F.polycom(X, W, rho=torch.sin, kind="III"), r"kind must be.*got 'III'"),
    "order of the split form": (
        lambda: F.poly_norm_stats(X, 2.5),
        r"order must be 1 to 8, got 2.5",
    ),
    "length of the split form": (
        lambda: F.poly_norm_apply(X, F.poly_norm_stats(X, 3), W, n=0),
        r"n must be the length of a whole row, at least 1, got 0",
    ),
    "stats of the split form": (
        lambda: F.poly_norm_apply(X, F.poly_norm_stats(X, 2), W, n=16),
        r"stats must have shape \(4, 3\).*got \(4, 2\)",
    ),
}


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(backend, case):
    call, text = REFUSED[case]
    with kernels.use_backend(backend), pytest.raises(ValueError, match=f"^poly.*{text}"):
        call()


@pytest.mark.parametrize("group", [[0, 1, 2, 0], [0, -1, 1, 0]])
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_no_group_out_of_range_is_taken(backend, group):
    calls = [
        lambda group: F.poly_norm(X, torch.randn(2, 3), group=group),
        lambda group: F.poly_relu(X, torch.randn(2, 3), group=group),
        lambda group: F.poly_relu(X, torch.randn(2, 3), slope=torch.randn(16), group=group),
    ]
    with kernels.use_backend(backend):
        for call in calls:
            call(GROUPS)
            with pytest.raises((ValueError, IndexError)):
                call(torch.tensor(group))


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_no_channels(backend):
    x, slope = torch.randn(2, 0, 3, requires_grad=True), torch.ones(0, requires_grad=True)
    with kernels.use_backend(backend):
        F.poly_relu(x, W, slope=slope).sum().backward()
    assert (x.grad.shape, slope.grad.shape) == (x.shape, slope.shape)
