"""The ablations of the PolyCom paper as lists of runs.

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884: section 4.4 with Figure 5, appendix G
with Figure 8 and Table 10. The paper shows one curve of 1.3B parameters for each activation, and
gives neither seeds nor a number of runs; here size, data, steps and seeds are the user's.
"""

from __future__ import annotations

import dataclasses

__all__ = ["STUDIES", "Size", "Study"]


@dataclasses.dataclass(frozen=True)
class Size:
    """A model as shares of the largest one: of its width and of its layers."""

    width: float
    layers: float


@dataclasses.dataclass(frozen=True)
class Study:
    """One question, and the activations that answer it.

    Attributes:
        title: what is varied, for the heading of the report.
        source: the place in the paper.
        question: what is asked.
        finding: what the paper says, in our words; None where it says nothing.
        acts: for each activation its overrides; the others are compared with the first.
        sizes: the models of a scaling study, the largest last; empty: the chosen one alone.
    """

    title: str
    source: str
    question: str
    finding: str | None
    acts: tuple[tuple[str, ...], ...]
    sizes: tuple[Size, ...] = ()


# Table 10: width 768, 1024, 1536 and 2048 with 12, 16, 16 and 24 layers.
_TABLE_10 = (Size(3 / 8, 1 / 2), Size(1 / 2, 2 / 3), Size(3 / 4, 2 / 3), Size(1, 1))

STUDIES: dict[str, Study] = {
    "activations": Study(
        title="Activations of the feed-forward network at equal parameters",
        source="Table 1, with ReLU squared from Figure 5c",
        question="Which activation reaches the lowest loss in a language model?",
        finding="PolyNorm and PolyReLU reach a lower loss than SwiGLU, GELU and ReLU, in this "
        "order",
        acts=(
            ("act=swiglu",),
            ("act=polynorm",),
            ("act=polyrelu",),
            ("act=gelu",),
            ("act=relu",),
            ("act=relu2",),
        ),
    ),
    "order": Study(
        title="Order of PolyReLU",
        source="Figure 5a",
        question="Does a higher order train faster?",
        finding="convergence is faster with a higher order, and orders 3 and 4 do not differ "
        "noticeably",
        acts=(("act=polyrelu",), ("act=polyrelu", "act.order=2"), ("act=polyrelu", "act.order=4")),
    ),
    "composition": Study(
        title="What the polynomial is composed with",
        source="Figure 5b",
        question="Which composition reaches the lowest training loss?",
        finding="PolyNorm reaches the lowest training loss; PolyReLUNorm comes in between",
        acts=(("act=polynorm",), ("act=polyrelu",), ("act=polyprelu",), ("act=polyrelunorm",)),
    ),
    "relu-variants": Study(
        title="PolyReLU among the variants of ReLU",
        source="Figure 5c",
        question="Is PolyReLU better than ReLU and than ReLU squared?",
        finding="PolyReLU is better than both",
        acts=(("act=polyrelu",), ("act=relu",), ("act=relu2",)),
    ),
    "scaling": Study(
        title="Scaling",
        source="Figure 8, sizes in the proportions of Table 10",
        question="Does the lead over SwiGLU hold at every size?",
        finding="PolyReLU and PolyNorm have a lower training loss than SwiGLU at each of four "
        "sizes from 110M to 1.3B parameters",
        acts=(("act=swiglu",), ("act=polyrelu",), ("act=polynorm",)),
        sizes=_TABLE_10,
    ),
    "coefficients": Study(
        title="Learned coefficients",
        source="section 4.1, which starts them at a_i = 1/3 and a_0 = 0",
        question="What does training make of the coefficients, and is the constant a_0 needed?",
        finding=None,
        acts=(
            ("act=polynorm",),
            ("act=polynorm", "act.bias=false"),
            ("act=polyrelu",),
            ("act=polyrelu", "act.bias=false"),
        ),
    ),
}
