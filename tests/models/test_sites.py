"""Feature dimensions found from shapes and neighbours, on networks small enough to know them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from timm.layers import BatchNormAct2d, LayerNorm2d, LayerNormAct2d, Mlp, SqueezeExcite
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.models.sites import Placeholder, Site, resolve_sites, separate_placeholders


def resolve(model: nn.Module, sizes: Sequence[int] = (8, 16), need_dim: bool = True) -> list[Site]:
    names = separate_placeholders(model)
    return resolve_sites(model, names, in_chans=3, sizes=sizes, need_dim=need_dim)


class Nhwc(nn.Module):
    """A convolution, then an MLP over the last dimension of a 4-d tensor, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.act = Placeholder()
        self.mlp = Mlp(6, act_layer=Placeholder)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.act(self.conv(x)).permute(0, 2, 3, 1))


class Residual(nn.Module):
    """The sum of two branches: no layer's output reaches the activation itself."""

    def __init__(self, after: nn.Module, tokens: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7) if tokens else nn.Conv2d(3, 7, 1)
        self.act = Placeholder()
        self.after = after
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 8:
            raise RuntimeError("fixed size")
        y = self.first(x[:, :1, :7, :7].flatten(1, 2)) if self.tokens else self.first(x)
        return self.after(self.act(y + y))


def test_channel_last_maps_and_images_in_one_network() -> None:
    assert resolve(Nhwc()) == [Site("act", 1), Site("mlp.act", -1)]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.Identity, LayerNorm2d, nn.Dropout2d])
def test_pooled_maps_follow_the_convolution_behind_other_modules(norm: type[nn.Module]) -> None:
    through = norm() if norm in (nn.Identity, nn.Dropout2d) else norm(5)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 5, 1), through, Placeholder())
    assert resolve(model) == [Site("3", 1)]


def test_squeeze_and_excitation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), SqueezeExcite(16, act_layer=Placeholder))
    assert resolve(model) == [Site("1.act", 1)]


@pytest.mark.parametrize("norm", [BatchNormAct2d, LayerNormAct2d])
def test_a_norm_that_holds_its_activation(norm: type[nn.Module]) -> None:
    # On a pooled map, where the sizes tell nothing.
    conv = nn.Conv2d(3, 5, 1)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv, norm(5, act_layer=Placeholder))
    assert resolve(model) == [Site("2.act", 1)]


def test_vectors_are_channel_last() -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5), Placeholder())
    assert resolve(model) == [Site("3", -1)]


@pytest.mark.parametrize(
    ("after", "tokens", "dim"), [(nn.Conv2d(7, 7, 1), False, 1), (nn.Linear(7, 4), True, -1)]
)
def test_a_fixed_size_sum_follows_the_layer_it_feeds(
    after: nn.Module, tokens: bool, dim: int
) -> None:
    # Tokens and features are both 7 here: nothing but the neighbour can tell them apart.
    assert resolve(Residual(after, tokens)) == [Site("act", dim)]


def test_a_site_that_nothing_tells_is_refused_by_name() -> None:
    with pytest.raises(PolyvisionError, match=r"site 'act' has no feature dimension .*\(2, 7, 7\)"):
        resolve(Residual(nn.Identity(), tokens=True))


def test_a_site_without_a_steady_dimension_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten(), Placeholder())
    with pytest.raises(PolyvisionError, match=r"'2' has no .*\(2, 192\) and \(2, 768\)"):
        resolve(model)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.act = Placeholder()
        self.unused = Placeholder()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.conv(x))
        return self.act(y.permute(0, 2, 3, 1))


def test_one_module_at_two_dimensions_is_refused() -> None:
    with pytest.raises(PolyvisionError, match=r"'act' is called .* dimensions \(\[-1, 1\]\)"):
        resolve(Reused())


def test_a_site_that_is_never_called_is_refused() -> None:
    with pytest.raises(PolyvisionError, match="site 'unused' is never called"):
        resolve(Reused(), need_dim=False)


def test_calls_are_counted() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    assert resolve(Twice(nn.Conv2d(3, 3, 1), Placeholder())) == [Site("1", 1, calls=2)]


def test_a_shared_module_becomes_two() -> None:
    shared = Placeholder()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), shared, nn.Conv2d(4, 4, 1), shared)
    assert resolve(model) == [Site("1", 1), Site("3", 1)]
    assert model[1] is not model[3]


def test_without_a_dimension_to_find_one_size_is_enough() -> None:
    assert resolve(Nhwc(), sizes=(8,), need_dim=False) == [Site("act", None), Site("mlp.act", None)]


def test_a_size_the_network_cannot_take_is_one_clear_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 9), Placeholder())
    text = "the model cannot take images of 8x8 pixels with 3 channels: "
    with pytest.raises(PolyvisionError, match=re.escape(text)) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


class Caching(nn.Module):
    """Keeps a tensor of its first eval pass, as position embeddings and biases do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.act = Placeholder()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        scale = self.cache.setdefault("scale", self.norm.weight[:, None, None] * 2)
        return self.act(self.norm(x)) * scale


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_network_stays_as_it_was(device: str) -> None:
    model = Caching().to(device).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert resolve(model) == [Site("act", 1)]
    assert model.training
    assert not model.cache
    assert not model._forward_hooks
    assert not model.act._forward_pre_hooks
    for name, value in model.state_dict().items():
        assert value.device.type == device
        assert device == "meta" or torch.equal(value, before[name])
