"""Networks whose calls depend on values are traced too, on made-up ones."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.ops import nms

from polyvision import swap_activations
from polyvision.errors import PolyvisionError

IMAGE = torch.zeros(2, 3, 16, 16)
NOTE = "what the network runs depends on values, which were made up to search it: see whether"


class Detector(nn.Module):
    """Selects by value in every way that a network for detection does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU()
        self.box = nn.Linear(4, 8)
        self.act_2 = nn.ReLU()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        boxes = self.act(self.conv(x)).permute(0, 2, 3, 1).flatten(0, 2)
        boxes = boxes[nms(boxes, boxes[:, 0], 0.5)]
        boxes = boxes[torch.where(boxes[:, 0] > 0.5)[0]]
        boxes = boxes.masked_select(boxes > -1e9).reshape(-1, 4)
        if not torch.isfinite(boxes).all():
            boxes = boxes[:0]
        boxes = torch.from_numpy(boxes.detach().numpy()).to(x) + boxes[:1].sum()
        return self.head(F.gelu(self.act_2(self.box(boxes))))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_selection_by_value_hides_no_site(device: str) -> None:
    model = Detector().to(device)
    report = swap_activations(model, "polynorm", inputs=IMAGE)
    assert [(s.name, s.dim) for s in report.sites] == [("act", 1), ("act_2", -1), ("gelu", -1)]
    assert report.leftovers == ()
    assert report.notes[0].startswith(NOTE)
    if device == "cpu":
        model(torch.rand(2, 3, 16, 16))


def limited(x: Tensor) -> Tensor:
    return x.clamp(min=0, max=32)


def test_limits_set_outside_of_any_module_stay() -> None:
    class Boxes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return limited(super().forward(x))

    report = swap_activations(Boxes(nn.Conv2d(3, 4, 1), nn.ReLU()), "polynorm", inputs=IMAGE)
    assert [s.name for s in report.sites] == ["1"]
    assert [(k.was, k.reason) for k in report.kept] == [("clamp()", "a gate")]


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("the images are not finite")
        x = self.conv(x)
        x = F.relu(x) if x.mean() > 0 else F.gelu(x)
        return torch.stack([F.silu(x) for _ in range(int(x.sum()))]) if x.sum().item() == 1 else x


def test_both_ways_of_a_decision_are_searched() -> None:
    class Both(Decides):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return F.relu(x) if x.mean() > 0 else F.gelu(x)

    model = Both()
    report = swap_activations(model, "polynorm", inputs=IMAGE)
    assert {s.was for s in report.sites} == {"relu()", "gelu()"}
    x = torch.randn(2, 3, 16, 16)
    h = model.conv(x)
    torch.testing.assert_close(model(x), model.relu(h) if h.mean() > 0 else model.gelu(h))


def test_a_check_for_mistakes_does_not_stop_the_search() -> None:
    report = swap_activations(Decides(), "polynorm", inputs=IMAGE)
    assert [s.was for s in report.sites] == ["gelu()"]  # with ones the check fails


def test_a_network_without_decisions_has_no_note() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    assert swap_activations(model, "polynorm", inputs=IMAGE).notes == ()


def test_what_fails_in_spite_of_made_up_values_is_one_line() -> None:
    class Strict(Detector):
        def forward(self, x: Tensor) -> Tensor:
            if bool(x.sum() == x.mean()) or True:
                raise RuntimeError("always\nfails")
            return x

    text = "Strict cannot be traced on inputs of shape (2, 3, 16, 16): always. Check that the net"
    with pytest.raises(PolyvisionError, match=re.escape(text)) as caught:
        swap_activations(Strict(), "polynorm", inputs=IMAGE)
    assert "\n" not in str(caught.value)


class Experts(nn.Module):
    """A mixture of experts that multiplies by groups, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.up = nn.Parameter(torch.randn(2, 8, 16))
        self.down = nn.Parameter(torch.randn(2, 16, 8))
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        choice = self.router(rows).argmax(-1)
        order = choice.argsort()
        ends = torch.histc(choice.float(), 2, 0, 1).cumsum(0).to(torch.int32)
        hidden = self.act(torch._grouped_mm(rows[order], self.up, ends))
        return torch._grouped_mm(hidden, self.down, ends)[order.argsort()].view_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_any_precision(dtype: torch.dtype) -> None:
    model = Experts().to(dtype)
    report = swap_activations(model, "polynorm", inputs=torch.zeros(2, 4, 8, dtype=dtype))
    assert [(s.name, s.dim) for s in report.sites] == [("act", -1)]
    assert torch.isfinite(model(torch.randn(2, 4, 8, dtype=dtype))).all()


@pytest.mark.parametrize(
    ("build", "sites", "functions"),
    [
        pytest.param(detection.ssdlite320_mobilenet_v3_large, 63, 0, marks=pytest.mark.slow),
        pytest.param(detection.retinanet_resnet50_fpn, 58, 1, marks=pytest.mark.slow),
        (detection.fasterrcnn_mobilenet_v3_large_320_fpn, 42, 2),
    ],
)
def test_networks_for_detection(build: type[nn.Module], sites: int, functions: int) -> None:
    model = build(weights=None, weights_backbone=None, num_classes=3)
    report = swap_activations(model, "polynorm", inputs=torch.empty(1, 3, 64, 64))
    assert len(report.sites) == sites
    assert [s.how for s in report.sites].count("function") == functions
    assert report.leftovers == ()
    assert all(s.dim == (-1 if "roi_heads" in s.name else 1) for s in report.sites)
    with torch.no_grad():
        (found,) = model.eval()(torch.rand(1, 3, 64, 64))
    assert set(found) == {"boxes", "labels", "scores"}
