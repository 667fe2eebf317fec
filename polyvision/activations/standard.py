"""Activations that torch has: its own classes, never in place.

Tools know them by their type: captum's DeepLift, quantization and fusion look for ``nn.ReLU``.
``inplace`` is accepted, as timm passes it, and ignored. None has parameters.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from polyvision.activations.registry import register_activation

__all__: list[str] = []

_ELU = "Clevert et al. 2015, https://arxiv.org/abs/1511.07289"
_GELU = "Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415"
_MOBILE = "Howard et al. 2019, https://arxiv.org/abs/1905.02244"
_TORCH = "PyTorch, https://docs.pytorch.org/docs/stable/generated/torch.nn."


def _register(
    name: str,
    cls: type[nn.Module],
    formula: str,
    bounds: str,
    source: str,
    *options: str,
    **fixed: Any,
) -> None:
    """Register a class of torch with those of its keywords that are ``options``."""
    keywords = inspect.signature(cls.__init__).parameters

    def make(inplace: bool = False, **given: Any) -> nn.Module:
        bound = signature.bind(inplace, **given)
        bound.apply_defaults()
        return cls(**fixed, **{key: bound.arguments[key] for key in options})

    chosen = [
        keywords[key].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=float)
        for key in options
    ]
    place = inspect.Parameter(
        "inplace", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=bool
    )
    signature = inspect.Signature([place, *chosen])
    make.__name__ = make.__qualname__ = name
    make.__annotations__ = {"inplace": bool, **dict.fromkeys(options, float)}
    make.__signature__ = signature  # type: ignore[attr-defined]
    make.__doc__ = f"``torch.nn.{cls.__name__}``, never in place: {formula}, in {bounds}. {source}"
    register_activation(name, kind="pointwise", source=source, formula=formula)(make)


# name, class, formula, range of its values, source, options
_register(
    "relu",
    nn.ReLU,
    "max(x, 0)",
    "[0, inf)",
    "Nair and Hinton 2010, https://www.cs.toronto.edu/~hinton/absps/reluICML.pdf",
)
_register(
    "leaky_relu",
    nn.LeakyReLU,
    "max(x, 0) + negative_slope min(x, 0)",
    "(-inf, inf)",
    "Maas et al. 2013, https://ai.stanford.edu/~amaas/papers/relu_hybrid_icml2013_final.pdf",
    "negative_slope",
)
_register(
    "relu6",
    nn.ReLU6,
    "min(max(x, 0), 6)",
    "[0, 6]",
    "Krizhevsky 2010, https://www.cs.toronto.edu/~kriz/conv-cifar10-aug2010.pdf",
)
_register(
    "hardtanh",
    nn.Hardtanh,
    "min(max(x, min_val), max_val)",
    "[min_val, max_val]",
    f"{_TORCH}Hardtanh.html",
    "min_val",
    "max_val",
)
_register(
    "softshrink",
    nn.Softshrink,
    "sign(x) max(|x| - lambd, 0)",
    "(-inf, inf)",
    f"{_TORCH}Softshrink.html",
    "lambd",
)
_register("elu", nn.ELU, "x for x > 0, else alpha (exp(x) - 1)", "(-alpha, inf)", _ELU, "alpha")
_register(
    "celu",
    nn.CELU,
    "max(x, 0) + min(0, alpha (exp(x / alpha) - 1))",
    "(-alpha, inf)",
    "Barron 2017, https://arxiv.org/abs/1704.07483",
    "alpha",
)
_register(
    "selu",
    nn.SELU,
    "s x for x > 0, else s a (exp(x) - 1), s = 1.0507, a = 1.6733",
    "(-1.758, inf)",
    "Klambauer et al. 2017, https://arxiv.org/abs/1706.02515",
)
_register(
    "softplus",
    nn.Softplus,
    "ln(1 + exp(beta x)) / beta, x where beta x > 20",
    "(0, inf)",
    "Dugas et al. 2000, https://papers.nips.cc/paper/1920-incorporating-second-order-functional-"
    "knowledge-for-better-option-pricing",
    "beta",
)
_register("gelu", nn.GELU, "x Phi(x)", "[-0.17, inf)", _GELU)
_register(
    "gelu_tanh",
    nn.GELU,
    "x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2",
    "[-0.17, inf)",
    _GELU,
    approximate="tanh",
)
_register(
    "silu",
    nn.SiLU,
    "x sigmoid(x)",
    "[-0.28, inf)",
    "Elfwing et al. 2017, https://arxiv.org/abs/1702.03118",
)
_register(
    "mish",
    nn.Mish,
    "x tanh(ln(1 + exp(x)))",
    "[-0.31, inf)",
    "Misra 2019, https://arxiv.org/abs/1908.08681",
)
_register("hardswish", nn.Hardswish, "x min(max(x + 3, 0), 6) / 6", "[-0.375, inf)", _MOBILE)
_register("sigmoid", nn.Sigmoid, "1 / (1 + exp(-x))", "(0, 1)", f"{_TORCH}Sigmoid.html")
_register("tanh", nn.Tanh, "tanh(x)", "(-1, 1)", f"{_TORCH}Tanh.html")
