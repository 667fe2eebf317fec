"""The modules in timm as they are, without any other part of polyvision."""

from __future__ import annotations

import pytest
import timm
import torch
from activation_oracles import UNGATED
from timm.layers import create_act_layer
from torch import nn

from polyvision import PolyNorm, PolyNorm2d
from polyvision.activations import activation_info


@pytest.mark.parametrize("name", UNGATED)
@pytest.mark.parametrize("inplace", [None, True, False])
def test_create_act_layer(name: str, inplace: bool | None) -> None:
    factory = activation_info(name).factory
    assert type(create_act_layer(factory, inplace=inplace)) is type(factory())


def test_a_bad_value_reaches_the_user_although_timm_retries() -> None:
    built = 0

    class Counted(PolyNorm):
        def __init__(self, *args: object, **keywords: object) -> None:
            nonlocal built
            built += 1
            super().__init__(*args, **keywords)

    with pytest.raises(ValueError, match="order must be an integer from 1 to 8, got 0"):
        create_act_layer(Counted, inplace=True, order=0)
    assert built == 1


def test_resnet18_trains_in_a_plain_loop() -> None:
    model = timm.create_model("resnet18", act_layer=PolyNorm2d, num_classes=4)
    sites = [m for m in model.modules() if isinstance(m, PolyNorm2d)]
    assert len(sites) == 17
    assert not any(isinstance(m, nn.ReLU) for m in model.modules())

    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(m.weight.unique().numel() == 3 for m in sites)
