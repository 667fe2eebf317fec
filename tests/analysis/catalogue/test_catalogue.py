"""The contract checks, on our activations and on broken ones; the commands that show and check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyvision import activation_names
from polyvision.analysis.catalogue.contract import (
    CHECKS,
    Subject,
    fp16_limit,
    kept_bytes,
    problem_of,
    subject_of,
)
from polyvision.analysis.catalogue.facts import curve, facts_of, in_terminal
from polyvision.cli import main

# The compiler takes seconds for each; `test_the_compiler_takes_every_activation` is slow.
QUICK = [name for name in CHECKS if not name.startswith("torch.")]


@pytest.mark.parametrize("name", activation_names())
def test_every_activation_keeps_the_contract(name: str) -> None:
    problems = {check: problem_of(CHECKS[check], subject_of(name)) for check in QUICK}
    assert {check: problem for check, problem in problems.items() if problem} == {}


@pytest.mark.slow
@pytest.mark.parametrize("check", ["torch.compile", "torch.export"])
@pytest.mark.parametrize("name", activation_names())
def test_the_compiler_takes_every_activation(name: str, check: str) -> None:
    assert problem_of(CHECKS[check], subject_of(name)) is None


class Good(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide + self.a.to(wide.dtype) * wide.sin()).to(x.dtype)


class NoInplace(Good):
    def __init__(self) -> None:
        super().__init__()


class AnyKeyword(Good):
    def __init__(self, inplace: bool = False, **_: Any) -> None:
        super().__init__()


class InPlace(Good):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp_(min=0) if self.inplace else x.clamp(min=0)


class Wide(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class WrongDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.1 * grad * ctx.saved_tensors[0].cos()


class Wrong(Good):
    def forward(self, x: Tensor) -> Tensor:
        return WrongDerivative.apply(x) * self.a.to(x.dtype)


class Rounds(Good):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 50) - 50 + self.a.to(x.dtype) * x


class Overflows(Good):
    def forward(self, x: Tensor) -> Tensor:
        return x * x / (1 + x.abs()) * self.a.to(x.dtype)


class Flat(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous().view(-1).view(x.shape[::-1]).reshape(x.shape) * (
            1 if x.is_contiguous() else 2
        )


class NoDimension(Good):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))


class Unused(Good):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))


class Unpicklable(Good):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.function = lambda x: x


class Random(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand_like(x)


class Branches(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) > 0 else -x)


class Greedy(Good):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for _ in range(12):
            y = y.sin()
        return y


@pytest.mark.parametrize(
    ("cls", "check", "said"),
    [
        (NoInplace, "constructor", "built with inplace=True, as timm does"),
        (AnyKeyword, "constructor", "accepts a keyword that it does not have"),
        (InPlace, "constructor", "built with inplace=True it changes its input"),
        (Wide, "shape and dtype", "its output for float16 is float32"),
        (Wrong, "gradient", "not the derivative of its values"),
        (Rounds, "half precision", "its output in float16 is"),
        (Overflows, "fp16 range", "in fp16 it is not finite at x = -"),
        (Flat, "layout", "computes something else for an input that is channels_last"),
        (NoDimension, "parameters", "a has no dimension"),
        (Unused, "parameters", "unused gets no gradient"),
        (Unpicklable, "copies", "pickle: "),
        (Random, "determinism", "two calls differ"),
        (Branches, "torch.compile", ""),
        (Branches, "torch.export", ""),
        (Greedy, "memory", "times each input for the backward pass"),
    ],
)
def test_each_check_finds_what_is_wrong(cls: type[nn.Module], check: str, said: str) -> None:
    problem = problem_of(CHECKS[check], Subject(cls.__name__, cls, "pointwise"))
    assert problem is not None
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize("check", QUICK)
def test_a_good_one_passes(check: str) -> None:
    assert problem_of(CHECKS[check], Subject("Good", Good, "pointwise")) is None


def test_range_and_bytes() -> None:
    assert fp16_limit(subject_of("relu2")) == 128  # 256^2 is above 65504
    assert fp16_limit(subject_of("relu")) == float("inf")
    assert kept_bytes(subject_of("relu")) == 4
    assert kept_bytes(subject_of("formula", f="x * sin(x)")) == 4


def test_curves_are_value_and_derivative() -> None:
    x, y, slope = curve("silu")
    gate = torch.sigmoid(x)
    torch.testing.assert_close(y, x * gate)
    torch.testing.assert_close(slope, gate + x * gate * (1 - gate))
    x, y, _ = curve("swiglu")
    torch.testing.assert_close(y, x * torch.sigmoid(x))
    x, y, slope = curve("formula", {"f": "x / rms(x)"})
    torch.testing.assert_close(y, x / x.square().mean().sqrt(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope, torch.full_like(x, float(y[-1] / x[-1])))
    lines = in_terminal("relu").splitlines()
    assert lines[0].startswith("  4.00")
    assert lines[0].rstrip().endswith("*")


def test_facts_of_a_formula() -> None:
    facts = facts_of("formula", {"f": "b * x / rms(x)", "init": {"b": 2.0}})
    assert (facts.kind, facts.formula) == ("normalising", "b * x / rms(x)")
    assert facts.parameters == {"b": "(1,): 2"}


def test_the_list_and_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["activations"]) == 0
    said = capsys.readouterr().out
    assert all(any(line.startswith(f"{n} ") for line in said.splitlines()) for n in UNIQUE)
    assert main(["activations", "--kind", "gated"]) == 0
    said = capsys.readouterr().out
    assert "swiglu" in said
    assert "polynorm " not in said
    assert main(["activations", "silu", "--output", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["activations", "silu", "--output", str(tmp_path / "a.pdf")]) == 2
    assert main(["activations", "slu"]) == 2
    assert "Did you mean 'silu'?" in capsys.readouterr().err


UNIQUE = activation_names()
FILE = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()

    def forward(self, x):
        return {}
"""


def test_check_on_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "polyvision.analysis.catalogue.check_command.CHECKS", {n: CHECKS[n] for n in QUICK}
    )
    good, bad = tmp_path / "checked_good.py", tmp_path / "checked_bad.py"
    functions = "\n\ndef number(): return 3\n\ndef broken(): 1 / 0\n"
    good.write_text(FILE.format("torch.relu(x)") + functions)
    bad.write_text(FILE.format("torch.relu(x) + torch.rand_like(x)"))
    assert main(["check", f"{good}:Mine"]) == 0
    assert f"all {len(QUICK)} checks passed" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["check", f"{bad}:Mine"])
    assert stop.value.code == 1
    failed = [n for n in capsys.readouterr().out.splitlines() if n.startswith("FAIL")]
    assert any("determinism  " in line and "two calls differ" in line for line in failed)
    for given, said in (
        (f"{good}:Mina", "Did you mean 'Mine'?"),
        (str(good), "say which class"),
        ("nothere:Mine", "there is no module 'nothere'"),
        ("nothere", "unknown activation 'nothere'"),
        (f"{good}:number", "number() cannot be built: it builds one of type int, not an nn.Module"),
        (f"{good}:broken", "broken() cannot be built: ZeroDivisionError: division by zero"),
        ("relu --kind gated", "--kind is for a class, and relu is registered: leave it out"),
    ):
        assert main(["check", *given.split()]) == 2
        assert said in capsys.readouterr().err
