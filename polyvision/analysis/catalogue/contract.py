"""The contract of an activation as a module, as checks that each say in one line what fails.

``polyvision check`` runs them on an activation of a user, the tests of this project on its own.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from polyvision.activations import activation_info
from polyvision.activations.registry import Kind
from polyvision.analysis.cost.saved_bytes import saved_bytes
from polyvision.errors import first_line

__all__ = ["CHECKS", "Subject", "fp16_limit", "kept_bytes", "problem_of", "subject_of"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Relative root mean square error of a few roundings to the dtype.
_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
_FP16_MAX = 65504.0


class _Broken(Exception):
    """What an activation does against the contract, in a few words."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """An activation to check.

    Attributes:
        name: for messages.
        make: its class, or a function that builds the module.
        kind: as in the registry.
        options: keywords that it is built with.
        surrogate: it is trained with another derivative than its own.
    """

    name: str
    make: Callable[..., nn.Module]
    kind: Kind
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    surrogate: bool = False

    def build(self, *arguments: Any, **keywords: Any) -> nn.Module:
        """Build the module; one that draws random numbers is in eval mode."""
        module: Any = self.make(*arguments, **self.options, **keywords)
        if not isinstance(module, nn.Module):
            raise _Broken(f"it builds one of type {type(module).__name__}, not an nn.Module")
        return module.eval() if self.kind == "stochastic" else module

    def inputs(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Draw inputs that require gradients, the same at each call: two for a gated one."""
        generator = torch.Generator().manual_seed(1)
        drawn = [
            2 * torch.randn(shape, generator=generator, dtype=torch.float64)
            for _ in range(2 if self.kind == "gated" else 1)
        ]
        return [x.to(dtype).requires_grad_() for x in drawn]


def subject_of(name: str, **options: Any) -> Subject:
    """Return a registered activation as what is checked.

    Raises:
        PolyvisionError: there is none of that name.
    """
    info = activation_info(name)
    return Subject(name, info.factory, info.kind_with(options), options, info.surrogate)


def problem_of(check: Callable[[Subject], object], subject: Subject) -> str | None:
    """Run one check and return what fails, in one line, or None."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            check(subject)
    except _Broken as broken:
        return str(broken)
    except Exception as error:  # whatever the code of a user raises
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _same(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.double(), wanted.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


def _error(found: Tensor, exact: Tensor) -> float:
    """Return the root mean square error relative to that of ``exact``."""
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm()) / (float(exact.norm()) or 1.0)


def _gradients(module: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the gradients of inputs and parameters for a fixed one of it."""
    y = module(*inputs)
    generator = torch.Generator().manual_seed(2)
    upstream = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    wanted = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    found = torch.autograd.grad(y, wanted, upstream, allow_unused=True)
    grads = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]
    return y.detach(), grads


def _constructor(subject: Subject) -> None:
    """Take ``inplace`` first, as timm passes it, and ignore it; refuse unknown keywords."""
    inputs = [x.detach() for x in subject.inputs(4, 6)]
    before = [x.clone() for x in inputs]
    plain = subject.build()
    want = plain(*inputs)
    builds: dict[str, Callable[[], nn.Module]] = {"no argument": subject.build}
    if subject.kind not in ("gated", "mixture"):  # which timm never builds
        builds |= {
            "inplace=True": lambda: subject.build(inplace=True),
            "inplace=False": lambda: subject.build(inplace=False),
            "True": lambda: subject.build(True),
        }
    for given, build in builds.items():
        try:
            module = build()
        except TypeError as error:
            raise _Broken(f"built with {given}, as timm does: {first_line(error)}") from error
        if not torch.equal(module(*inputs), want):
            raise _Broken(f"built with {given} it computes something else")
        if any(not torch.equal(x, old) for x, old in zip(inputs, before, strict=True)):
            raise _Broken(f"built with {given} it changes its input in place")
    try:
        subject.build(no_such_keyword=1)
    except (TypeError, ValueError):
        pass
    else:
        raise _Broken("it accepts a keyword that it does not have, no_such_keyword=1")
    parameters = inspect.signature(subject.make).parameters
    if subject.kind == "normalising" and "dim" not in parameters:
        raise _Broken("it is normalising, and has no keyword dim for the feature dimension")


def _shape_and_dtype(subject: Subject) -> None:
    """Return the shape and dtype of the input, for four dtypes and several shapes."""
    for dtype in _DTYPES:
        for shape in ((6,), (4, 6), (2, 3, 6), (2, 6, 4, 6)):
            inputs = subject.inputs(*shape, dtype=dtype)
            y = subject.build()(*inputs)
            if y.shape != inputs[0].shape:
                raise _Broken(f"its output for {shape} has shape {tuple(y.shape)}")
            if y.dtype != dtype:
                raise _Broken(f"its output for {_name(dtype)} is {_name(y.dtype)}")
            y.sum().backward()
            if inputs[0].grad is None or inputs[0].grad.dtype != dtype:
                raise _Broken(f"its gradient for {_name(dtype)} is missing or of another dtype")


def _gradient(subject: Subject) -> None:
    """Have the derivative of its values: finite differences in float64, fp32 beside float64."""
    module = subject.build().double()
    inputs = subject.inputs(3, 5, dtype=torch.float64)
    if not subject.surrogate:
        try:
            torch.autograd.gradcheck(module, inputs)
            for name, parameter in module.named_parameters():
                torch.autograd.gradcheck(_of_parameter(module, name, inputs), [parameter])
        except GradcheckError as error:
            raise _Broken(_shortened(error)) from error
    narrow = copy.deepcopy(module).float()
    _, exact = _gradients(module, inputs)
    _, found = _gradients(narrow, [x.detach().float().requires_grad_() for x in inputs])
    for ours, theirs in zip(found, exact, strict=True):
        if (off := _error(ours, theirs)) > _TOLERANCE[torch.float32]:
            raise _Broken(f"its gradient in fp32 is {off:.1e} from that in float64, relatively")


def _of_parameter(module: nn.Module, name: str, inputs: list[Tensor]) -> Callable[[Tensor], Tensor]:
    fixed = tuple(x.detach() for x in inputs)
    return lambda value: torch.func.functional_call(module, {name: value}, fixed)


def _shortened(error: Exception) -> str:
    text = str(error)
    numbers = [" ".join(line.split()) for line in text.splitlines() if "tensor(" in line]
    known = "its gradient is not the derivative of its values, by finite differences in float64"
    return known if numbers or "Jacobian" in text else f"{known}: {first_line(error)}"


def _half_precision(subject: Subject) -> None:
    """Compute fp16 and bf16 in fp32: the error is that of rounding the result."""
    module = subject.build()
    exact = copy.deepcopy(module).double()
    for dtype in (torch.float16, torch.bfloat16):
        inputs = [x.detach() for x in subject.inputs(64, 64, dtype=dtype)]
        error = _error(module(*inputs), exact(*(x.double() for x in inputs)))
        if not error <= _TOLERANCE[dtype]:
            raise _Broken(
                f"its output in {_name(dtype)} is {error:.1e} from float64, relatively; rounding "
                f"alone makes {_TOLERANCE[dtype] / 4:.0e}: compute x.float() and round at the end"
            )


def _fp16_range(subject: Subject) -> None:
    """Be finite in fp16 wherever the exact result fits, gradients included."""
    module = subject.build()
    exact = copy.deepcopy(module).double()
    for power in range(-14, 16):
        inputs = _spread(subject, 2.0**power)
        y, grads = _gradients(module, inputs)
        with torch.no_grad():
            want = exact(*(x.double() for x in inputs))
        fits = want.abs() <= _FP16_MAX
        if not y[fits].isfinite().all():
            at = inputs[0].detach()[fits & ~y.isfinite()].flatten()[0]
            raise _Broken(f"in fp16 it is not finite at x = {float(at):g}, and the result would be")
        if fits.all() and not all(g.isfinite().all() for g in grads[: len(inputs)]):
            raise _Broken(f"its gradient in fp16 is not finite for |x| up to {2.0**power:g}")


def fp16_limit(subject: Subject) -> float:
    """Return the power of two up to which a value in fp16 gives a finite one; inf for every one."""
    module = subject.build()
    limit = 0.0
    for power in range(-14, 16):
        with torch.no_grad():
            if not module(*_spread(subject, 2.0**power)).isfinite().all():
                return limit
        limit = 2.0**power
    return math.inf


def _spread(subject: Subject, size: float) -> list[Tensor]:
    """Return fp16 inputs of both signs, up to ``size``."""
    row = torch.linspace(-1, 1, 33, dtype=torch.float64) * size
    return [row.half()[None].clone().requires_grad_() for _ in subject.inputs(1)]


def _layout(subject: Subject) -> None:
    """Compute the same for every memory layout, and leave input and gradient as they are."""
    module = subject.build()
    inputs = subject.inputs(2, 6, 4, 6)
    want = module(*inputs)
    for what, change in (
        ("channels_last", lambda x: x.to(memory_format=torch.channels_last)),
        ("transposed", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        ("strided", lambda x: torch.stack([x, x], -1)[..., 0]),
    ):
        if not _same(module(*(change(x.detach()) for x in inputs)), want):
            raise _Broken(f"it computes something else for an input that is {what}")
    upstream = torch.randn(want.shape)
    before = [t.detach().clone() for t in (*inputs, upstream)]
    want.backward(upstream)
    for tensor, old in zip((*inputs, upstream), before, strict=True):
        if not torch.equal(tensor, old):
            raise _Broken("its backward pass changes the input or the incoming gradient")


def _parameters(subject: Subject) -> None:
    """Have parameters of one dimension or more, each with a gradient."""
    module = subject.build()
    module(*subject.inputs(16, 6)).square().sum().backward()
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise _Broken(f"{name} has no dimension, which sharding cannot split: use shape (1,)")
        if parameter.requires_grad and parameter.grad is None:
            raise _Broken(f"{name} gets no gradient")
        if not parameter.requires_grad or parameter.grad is None:
            continue
        if not parameter.grad.isfinite().all():
            raise _Broken(f"the gradient of {name} is not finite")
        if not parameter.grad.any():
            raise _Broken(f"the gradient of {name} is 0 for every input")


def _copies(subject: Subject) -> None:
    """Survive deepcopy, pickle and a state_dict, and share nothing with the copy."""
    module = subject.build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.25).add_(0.0625)
    inputs = subject.inputs(4, 6)
    want = module(*inputs)
    ways: dict[str, Callable[[], nn.Module]] = {
        "deepcopy": lambda: copy.deepcopy(module),
        "pickle": lambda: pickle.loads(pickle.dumps(module)),
        "state_dict": lambda: _restored(module, subject.build()),
    }
    for way, make in ways.items():
        try:
            twin = make()
        except Exception as error:
            raise _Broken(f"{way}: {type(error).__name__}: {first_line(error)}") from error
        if not torch.equal(twin(*inputs), want):
            raise _Broken(f"{way}: the copy computes something else")
        own = {p.data_ptr() for p in module.parameters()}
        if any(p.data_ptr() in own for p in twin.parameters()):
            raise _Broken(f"{way}: the copy shares parameters with the original")


def _restored(module: nn.Module, fresh: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    return fresh


def _determinism(subject: Subject) -> None:
    """Give the same bits twice; one that draws random numbers, under the same seed and in eval."""
    module = subject.build()
    twice = zip(_all(module, subject), _all(module, subject), strict=True)
    if any(not torch.equal(a, b) for a, b in twice):
        raise _Broken("two calls in eval mode differ" if subject.kind == "stochastic" else _TWICE)
    module.train()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(_all(module, subject))
    if any(not torch.equal(a, b) for a, b in zip(*results, strict=True)):
        raise _Broken("two calls in training mode under the same seed differ")


_TWICE = "two calls differ; one that draws random numbers is of the kind stochastic"


def _all(module: nn.Module, subject: Subject) -> list[Tensor]:
    y, grads = _gradients(module, subject.inputs(4, 6))
    return [y, *grads]


def _compiled(subject: Subject) -> None:
    """Go through torch.compile in one graph, gradients included."""
    module = subject.build()
    torch._dynamo.reset()
    whole: Any = torch.compile(module, backend="aot_eager", fullgraph=True)
    want, wanted = _gradients(module, subject.inputs(4, 6))
    got, found = _gradients(whole, subject.inputs(4, 6))
    for ours, theirs in zip((got, *found), (want, *wanted), strict=True):
        if not _same(ours, theirs):
            raise _Broken("compiled it computes something else")


def _exported(subject: Subject) -> None:
    """Go through torch.export, and through tensors without data."""
    module = subject.build()
    inputs = tuple(x.detach() for x in subject.inputs(4, 6))
    program = torch.export.export(module, inputs)
    if not _same(program.module()(*inputs), module(*inputs)):
        raise _Broken("exported it computes something else")
    with torch.device("meta"):
        y = subject.build()(*(torch.empty(2, 6) for _ in inputs))
    if not y.is_meta:
        raise _Broken("on the meta device its output has values")


def _memory(subject: Subject) -> None:
    """Keep no more than eight tensors of its size for each input, for the backward pass."""
    kept = kept_bytes(subject) / 4 / len(subject.inputs(1))
    if kept > 8:
        raise _Broken(
            f"it keeps {kept:.1f} times each input for the backward pass; "
            f"torch.utils.checkpoint keeps one"
        )


def kept_bytes(subject: Subject, dtype: torch.dtype = torch.float32) -> float:
    """Return the bytes of each element that are kept for the backward pass, inputs included."""
    inputs = subject.inputs(64, 128)
    module = subject.build().train()
    kept = saved_bytes(module, "fused", [x.shape for x in inputs], dtype)
    own = sum(p.numel() * p.element_size() for p in module.parameters())
    return max(kept - own, 0) / inputs[0].numel()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CHECKS: dict[str, Callable[[Subject], None]] = {
    "constructor": _constructor,
    "shape and dtype": _shape_and_dtype,
    "gradient": _gradient,
    "half precision": _half_precision,
    "fp16 range": _fp16_range,
    "layout": _layout,
    "parameters": _parameters,
    "copies": _copies,
    "determinism": _determinism,
    "torch.compile": _compiled,
    "torch.export": _exported,
    "memory": _memory,
}
