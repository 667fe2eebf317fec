"""Pointwise functions from one formula: what is learned, what is kept, in which precision.

A subclass states its function once, as a plain torch expression:

    class Swish(Pointwise):
        @staticmethod
        def formula(x: Tensor, *, beta: Tensor = learned(1.0)) -> Tensor:
            return x * torch.sigmoid(beta * x)

Its constructor follows from the keywords of the formula: what is ``learned`` is a parameter with
that initial value, others are constants. Where initial values depend on a degree or a choice, a
second function, ``initial``, takes these and returns the values; a sequence of numbers is one
parameter, and the formula gets a tuple of tensors.

Only the input is kept for the backward pass, which computes the rest again. fp16 and bf16 are
computed in fp32 and rounded once; fp64 stays fp64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor, nn

from polyvision.activations.base.coefficients import (
    Coefficients,
    integer,
    is_traced,
    step_of_a_graph,
)
from polyvision.activations.base.shared import finite
from polyvision.errors import PolyvisionError, unknown
from polyvision.kernels.reference import compute_dtype
from polyvision.kernels.steps import Steps, integral, stepped, straight_through
from polyvision.recompute import recompute

__all__ = ["Pointwise", "Stepped", "Value", "learned"]

Value: TypeAlias = float | Sequence[float]


class _Initial(NamedTuple):
    value: float


def learned(value: float) -> Any:
    """Make a keyword of a formula a parameter that starts at ``value``."""
    return _Initial(value)


# Single steps in a graph of torch.fx, where shapes and dtypes are not known yet.
torch.fx.wrap("compute_dtype")
torch.fx.wrap("_per_channel")


class Pointwise(Coefficients):
    """A pointwise function with its parameters; see the module's text.

    Every constructor takes ``inplace`` first, which timm passes and which is ignored. One with
    parameters also takes the keywords below. A number for each parameter is its initial value.

    Args:
        learned: initial values of the parameters; those of a sequence form one parameter.
        constants: the other keywords of the formula.
        shown: what the representation shows, None for all values.
        trainable: learn the parameters; otherwise they are constants.
        num_parameters: 1 for one set for all elements, or the number of channels for a set each.
        dim: the dimension of the channels; only read where ``num_parameters`` is not 1.
        device: where the parameters live.
        dtype: dtype of the parameters; the output has the input's dtype whatever it is.

    Shape:
        Input and output: any shape. Parameters: (num_parameters,), or (n,) and (n, num_parameters)
        for a sequence of n numbers.

    Raises:
        ValueError: a value does not fit.
    """

    formula: ClassVar[Callable[..., Tensor]]
    initial: ClassVar[Callable[..., dict[str, Value]] | None] = None
    positive: ClassVar[frozenset[str]] = frozenset()  # keywords that must be greater than 0
    counts: ClassVar[frozenset[str]] = frozenset()  # keywords that are integers from 1 to 64
    trainable: ClassVar[bool] = True  # the default of that keyword

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "formula" in cls.__dict__ and "__init__" not in cls.__dict__:
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]

    def __init__(
        self,
        learned: Mapping[str, Value],
        constants: Mapping[str, Any] | None = None,
        *,
        shown: Mapping[str, Any] | None = None,
        trainable: bool = True,
        num_parameters: int = 1,
        dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        given = {**learned, **(constants or {})}
        for key, value in given.items():
            if key in learned or not isinstance(value, str):  # else one of the named choices
                self._check(key, value)
        if not integer(num_parameters) or num_parameters < 1:
            raise self._refused("num_parameters", "a positive integer", num_parameters)
        if not isinstance(trainable, bool):
            raise self._refused("trainable", "True or False", trainable)
        if not integer(dim):
            raise self._refused("dim", "an integer", dim)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise self._refused("dtype", "a floating-point torch.dtype", dtype)
        self._given, self._shown = given, given if shown is None else dict(shown)
        self._learned = tuple(learned) if trainable else ()
        self._channels = num_parameters
        if num_parameters != 1:
            if not self._learned:
                raise self._refused("num_parameters", "1 where nothing is learned", num_parameters)
            self.dim = dim
        for key in self._learned:
            value = given[key]
            shape = [len(value)] if isinstance(value, Sequence) else []
            if num_parameters != 1 or not shape:
                shape.append(num_parameters)
            self.register_parameter(
                key, nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every parameter to its initial value."""
        with torch.no_grad():
            for key in self._learned:
                parameter, value = getattr(self, key), self._given[key]
                if not isinstance(value, Sequence):
                    parameter.fill_(value)
                    continue
                for place, number in enumerate(value):
                    parameter[place].fill_(number)

    def function_name(self) -> str:
        """Name the function that the parameters belong to."""
        return type(self).__name__

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to ``x``."""
        if is_traced(x):
            step: Tensor | None = step_of_a_graph(self, x)
            return self._traced(x, *self._values()) if step is None else step
        return self._kept(x, *self._values())

    def plain(self, x: Tensor) -> Tensor:
        """Apply the formula in the dtype of ``x`` and keep whatever autograd keeps."""
        return self.formula(x, **self._arguments(x, x.dtype, self._values()))

    def extra_repr(self) -> str:
        """Show initial values, constants and channels."""
        shown = [f"{key}={value}" for key, value in self._shown.items()]
        if self._channels != 1:
            shown += [f"num_parameters={self._channels}", f"dim={self.dim}"]
        learnable = "trainable" in inspect.signature(type(self)).parameters
        if learnable and bool(self._learned) != type(self).trainable:
            shown.append(f"trainable={bool(self._learned)}")
        return ", ".join(shown)

    def _values(self) -> list[Tensor]:
        return [getattr(self, key) for key in self._learned]

    def _kept(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return recompute(self._computed, x, *parameters)

    def _traced(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return self._computed(x, *parameters)

    def _computed(self, x: Tensor, *parameters: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        return self.formula(x.to(dtype), **self._arguments(x, dtype, parameters)).to(x.dtype)

    def _arguments(
        self, x: Tensor, dtype: torch.dtype, parameters: Sequence[Tensor]
    ) -> dict[str, Any]:
        """Return the keywords of the formula: parameters that broadcast with ``x``, constants."""
        arguments: dict[str, Any] = dict(self._given)
        for key, parameter in zip(self._learned, parameters, strict=True):
            wide, value = parameter.to(dtype), self._given[key]
            if not isinstance(value, Sequence):
                arguments[key] = self._spread(wide, x) if self._channels != 1 else wide[0]
            elif self._channels != 1:
                arguments[key] = tuple(self._spread(wide[i], x) for i in range(len(value)))
            else:
                arguments[key] = tuple(wide[i] for i in range(len(value)))
        return arguments

    def _spread(self, values: Tensor, x: Tensor) -> Tensor:
        return _per_channel(values, x, self.dim, type(self).__name__)

    def _check(self, key: str, value: Any) -> None:
        if key in type(self).counts:
            if not integer(value) or not 1 <= value <= 64:
                raise self._refused(key, "an integer from 1 to 64", value)
            return
        if isinstance(value, Sequence) and not isinstance(value, str):
            for number in value:
                self._check(key, number)
            return
        positive = " greater than 0" if key in type(self).positive else ""
        if not finite(value) or (positive and value <= 0):
            raise self._refused(key, f"a finite number{positive}", value)

    def _refused(self, key: str, wanted: str, value: Any) -> PolyvisionError:
        return PolyvisionError(f"{type(self).__name__}: {key} must be {wanted}, got {value!r}")


class Stepped(Pointwise):
    """A pointwise function whose derivative, its own or a chosen one, is piecewise constant.

    One or two bits an element are kept for the backward pass instead of the input.
    """

    steps: ClassVar[Callable[..., Steps]]  # from the constants to the derivative

    def _kept(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return stepped(self._computed, type(self).steps(**self._given), x)

    def _traced(self, x: Tensor, *parameters: Tensor) -> Tensor:
        other = integral(x.to(compute_dtype(x)), type(self).steps(**self._given))
        return straight_through(self._computed(x), other)


def _per_channel(values: Tensor, x: Tensor, dim: int, name: str) -> Tensor:
    """Shape one value for each channel of ``dim`` so that it broadcasts with ``x``."""
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != len(values):
        raise PolyvisionError(
            f"{name}: num_parameters={len(values)} needs as many channels in dim {dim}, got x of "
            f"shape {tuple(x.shape)}"
        )
    return values.view(-1, *[1] * (x.ndim - 1 - dim % x.ndim))


def _keywords(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return type and default of every keyword of a function."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: (hints[p.name], p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def _constructor(cls: type[Pointwise]) -> Callable[..., None]:
    """Make the constructor of a class from the keywords of its formula."""
    of_formula, initial = _keywords(cls.formula), cls.initial
    empty = inspect.Parameter.empty
    learned = [k for k, (_, d) in of_formula.items() if d is empty or isinstance(d, _Initial)]
    constants = [key for key in of_formula if key not in learned]
    of_initial = {} if initial is None else _keywords(initial)
    own: dict[str, tuple[Any, Any]] = dict(of_initial)
    for key, (kind, default) in of_formula.items():
        if isinstance(default, _Initial):
            own[key] = (float, default.value)
        elif key in constants:
            own[key] = (kind, default)
    settings: dict[str, tuple[Any, Any]] = {}
    if learned:
        settings = {
            "trainable": (bool, cls.trainable),
            "num_parameters": (int, 1),
            "dim": (int, 1),
            "device": (torch.device | str | None, None),
            "dtype": (torch.dtype | None, None),
        }
    kinds = inspect.Parameter
    signature = inspect.Signature(
        [
            kinds("self", kinds.POSITIONAL_ONLY),
            kinds("inplace", kinds.POSITIONAL_OR_KEYWORD, default=False, annotation=bool),
            *(
                kinds(key, kinds.KEYWORD_ONLY, default=default, annotation=kind)
                for key, (kind, default) in (own | settings).items()
            ),
        ]
    )

    def __init__(*args: Any, **given: Any) -> None:
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        self, values = args[0], bound.arguments
        for key, (kind, _) in own.items():
            if get_origin(kind) is not Literal:
                self._check(key, values[key])
            elif values[key] not in get_args(kind):
                raise unknown(f"{key} of {cls.__name__}", str(values[key]), get_args(kind))
        Pointwise.__init__(
            self,
            {key: values[key] for key in learned if key in own}
            | ({} if initial is None else initial(**{key: values[key] for key in of_initial})),
            {key: values[key] for key in constants},
            shown={key: values[key] for key in own},
            **{key: values[key] for key in settings},
        )

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__annotations__ = {key: kind for key, (kind, _) in (own | settings).items()}
    __init__.__annotations__["inplace"] = bool
    return __init__
