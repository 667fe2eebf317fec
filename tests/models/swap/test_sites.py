"""Feature dimensions found from shapes and neighbours, on networks small enough to know them."""

from __future__ import annotations

import re

import pytest
import torch
from timm.layers import BatchNormAct2d, LayerNorm2d, LayerNormAct2d, Mlp, SqueezeExcite
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.models.swap.replace import swap_activations
from polyvision.models.swap.sites import find_sites
from polyvision.models.trace.inputs import image_inputs


def resolve(model: nn.Module) -> list[tuple[str, int]]:
    """Return name and dimension of every site; images of 8x8 pixels, and 16x16 where they fit."""
    report = swap_activations(model, "polynorm", inputs=image_inputs(model, 8, 3))
    return [(site.name, site.dim) for site in report.sites]


class Nhwc(nn.Module):
    """A convolution, then an MLP over the last dimension of a 4-d tensor, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.act = nn.ReLU()
        self.mlp = Mlp(6, act_layer=nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.act(self.conv(x)).permute(0, 2, 3, 1))


class Reshaped(nn.Module):
    """A change of shape between layer and activation, which hides the one from the other."""

    def __init__(self, after: nn.Module, tokens: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7) if tokens else nn.Conv2d(3, 7, 1)
        self.act = nn.ReLU()
        self.after = after
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 8:
            raise RuntimeError("fixed size")
        y = self.first(x[:, :1, :7, :7].flatten(1, 2)) if self.tokens else self.first(x)
        return self.after(self.act(y.flatten().view(y.shape)))


def test_channel_last_maps_and_images_in_one_network() -> None:
    assert resolve(Nhwc()) == [("act", 1), ("mlp.act", -1)]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.Identity, LayerNorm2d, nn.Dropout2d])
def test_pooled_maps_follow_the_convolution_behind_other_modules(norm: type[nn.Module]) -> None:
    through = norm() if norm in (nn.Identity, nn.Dropout2d) else norm(5)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 5, 1), through, nn.ReLU())
    assert resolve(model) == [("3", 1)]


def test_squeeze_and_excitation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), SqueezeExcite(16, act_layer=nn.ReLU))
    assert resolve(model) == [("1.act", 1)]


@pytest.mark.parametrize("norm", [BatchNormAct2d, LayerNormAct2d])
def test_a_norm_that_holds_its_activation(norm: type[nn.Module]) -> None:
    # On a pooled map, where the sizes tell nothing.
    conv = nn.Conv2d(3, 5, 1)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv, norm(5, act_layer=nn.ReLU))
    assert resolve(model) == [("2.act", 1)]


def test_vectors_are_channel_last() -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5), nn.ReLU())
    assert resolve(model) == [("3", -1)]


@pytest.mark.parametrize(
    ("after", "tokens", "dim"), [(nn.Conv2d(7, 7, 1), False, 1), (nn.Linear(7, 4), True, -1)]
)
def test_a_site_of_fixed_size_follows_the_layer_it_feeds(
    after: nn.Module, tokens: bool, dim: int
) -> None:
    # Tokens and features are both 7 here: nothing but the neighbour can tell them apart.
    assert resolve(Reshaped(after, tokens)) == [("act", dim)]


def test_a_site_that_nothing_tells_is_refused_by_name() -> None:
    with pytest.raises(PolyvisionError, match=r"site 'act' has no feature dimension .*\(2, 7, 7\)"):
        resolve(Reshaped(nn.Identity(), tokens=True))


def test_a_site_without_a_steady_dimension_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten(), nn.ReLU())
    with pytest.raises(PolyvisionError, match=r"'2' has no .*\(2, 192\) and \(2, 768\)"):
        resolve(model)


class Reused(nn.Module):
    """One module over the channels of NCHW and over those of NHWC, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU()
        self.unused = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.conv(x))
        return self.act(y.permute(0, 2, 3, 1))


def test_one_module_at_two_dimensions_becomes_two() -> None:
    assert resolve(Reused()) == [("act", 1), ("act_2", -1)]


def test_two_dimensions_at_one_place_are_refused() -> None:
    class Loop(Reused):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
                x = self.act(x.permute(order))
            return x

    with pytest.raises(PolyvisionError, match=r"'act' is called .* dimensions \(\[-1, 1\]\)"):
        resolve(Loop())


def test_a_site_that_is_never_called_stays_and_is_listed() -> None:
    model = Reused()
    report = swap_activations(model, "relu2", inputs=image_inputs(model, 8))
    assert [(k.name, k.reason) for k in report.kept] == [("unused", "never called")]
    assert type(model.unused) is nn.ReLU


def test_calls_that_no_source_tells_apart_are_counted() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = super().forward(x)
            return x

    model = Twice(nn.Conv2d(3, 3, 1), nn.ReLU())
    (site,) = swap_activations(model, "polynorm", inputs=image_inputs(model, 8)).sites
    assert (site.name, site.dim, site.calls) == ("1", 1, 2)


def test_a_shared_module_becomes_two() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), shared, nn.Conv2d(4, 4, 1), shared)
    assert resolve(model) == [("1", 1), ("3", 1)]
    assert model[1] is not model[3]


def test_a_pointwise_activation_asks_for_no_dimension() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten(), nn.ReLU())
    (site,) = swap_activations(model, "relu2", inputs=image_inputs(model, 8)).sites
    assert site.dim is None


def test_a_size_the_network_cannot_take_is_one_clear_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 9), nn.ReLU())
    text = "Sequential cannot be traced on inputs of shape (2, 3, 8, 8): "
    with pytest.raises(PolyvisionError, match=re.escape(text)) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


class Caching(nn.Module):
    """Keeps a tensor of its first eval pass, as position embeddings and biases do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        scale = self.cache.setdefault("scale", self.norm.weight[:, None, None] * 2)
        return self.act(self.norm(x)) * scale


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_network_stays_as_it_was(device: str) -> None:
    model = Caching().to(device).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (site,), _, _ = find_sites(model, image_inputs(model, 8, 3), need_dim=True)
    assert (site.name, site.dim) == ("act", 1)
    assert model.training
    assert not model.cache
    assert not model._forward_hooks
    assert not model.act._forward_pre_hooks
    for name, value in model.state_dict().items():
        assert value.device.type == device
        assert device == "meta" or torch.equal(value, before[name])


def test_sites_of_two_sizes_are_equal_and_shown_by_name_role_dim_and_calls() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    small, large = (
        find_sites(model, image_inputs(model, size), need_dim=True)[0] for size in (8, 16)
    )
    assert small == large
    assert repr(small) == "[Site(name='1', role='block', dim=1, calls=1)]"
