"""One network of every timm family that accepts ``act_layer``: a slow, whole table."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from polyvision.models.vision import create_vision_model

# Smallest network of the family, image size, sites that are NCHW, sites that are channel-last,
# built-in activations that remain. Reviewed against the source of each family in timm 1.0.31.
FAMILIES = [
    ("halonet_h1", 256, 58, 0, 0),
    ("test_byobnet", 160, 10, 0, 4),
    ("cait_xxs24_224", 224, 0, 26, 0),
    ("test_convnext", 160, 0, 9, 0),
    ("cs3darknet_focus_s", 256, 31, 0, 0),
    ("cspnext_tiny", 256, 33, 0, 0),
    ("deit_tiny_patch16_224", 224, 0, 12, 0),
    ("densenet121", 224, 121, 0, 0),
    ("edgenext_xx_small", 256, 0, 12, 0),
    ("efficientformerv2_s0", 224, 35, 0, 0),
    ("test_efficientnet", 160, 11, 0, 0),
    ("fasternet_t0", 224, 14, 0, 0),
    ("gemma4_vit_167m", 768, 0, 16, 0),
    ("sam2_hiera_tiny", 896, 0, 12, 0),
    ("iformer_t", 224, 18, 0, 0),
    ("inception_v3", 299, 94, 0, 0),
    ("inception_v4", 299, 149, 0, 0),
    ("lcnetv2_small", 224, 32, 0, 0),
    ("levit_128s", 224, 3, 22, 0),
    ("gmlp_ti16_224", 224, 0, 30, 0),
    ("mobilenetv3_small_050", 224, 19, 0, 14),
    ("mobilenetv5_base", 256, 31, 0, 0),
    ("mobilevit_xxs", 256, 25, 9, 0),
    ("naflexvit_base_patch16_parfac_gap", 384, 0, 12, 0),
    ("nest_tiny", 224, 0, 12, 0),
    ("nextvit_small", 224, 44, 0, 0),
    ("qwen3_vit_88m", 768, 0, 12, 0),
    ("rdnet_tiny", 224, 21, 0, 0),
    ("regnetx_002", 224, 40, 0, 0),
    ("res2next50", 224, 17, 0, 0),
    ("test_resnet", 160, 12, 0, 0),
    ("resnetv2_18", 224, 17, 0, 0),
    ("sequencer2d_s", 224, 0, 18, 0),
    ("starnet_s050", 224, 7, 0, 0),
    ("tiny_vit_5m_224", 224, 13, 10, 0),
    ("vgg11", 224, 10, 0, 0),
    ("test_vit", 160, 0, 6, 0),
    ("samvit_base_patch16_224", 224, 0, 12, 0),
    ("ese_vovnet19b_slim_dw", 224, 22, 0, 0),
    ("xception41p", 299, 41, 0, 0),
    ("xcit_nano_12_p8_224", 224, 14, 14, 0),
    ("cpubone_nano", 224, 9, 1, 3),
    ("dpn48b", 224, 2, 0, 52),
    ("efficientformer_l1", 224, 14, 1, 2),
    ("efficientvit_b0", 224, 22, 0, 6),
    ("fastvit_t8", 256, 17, 0, 1),
    ("gcvit_xxtiny", 224, 2, 12, 20),
    ("hardcorenas_b", 224, 25, 0, 17),
    ("inception_next_atto", 224, 12, 0, 1),
    ("inception_resnet_v2", 299, 204, 0, 39),
    ("lowformer_b0", 224, 17, 1, 7),
    ("test_mambaout", 160, 1, 6, 1),
    ("repvit_m1", 224, 27, 0, 10),
    ("resnest14d", 224, 11, 0, 8),
    ("rexnet_100", 224, 17, 0, 29),
    ("shvit_s1", 224, 20, 0, 13),
    ("skresnet18", 224, 25, 0, 8),
    ("swiftformer_xs", 224, 20, 0, 2),
    ("swinv2_tiny_window8_256", 256, 0, 12, 12),
    ("vit_tiny_r_s16_p8_224", 224, 0, 12, 1),
    ("test_vit_relpos", 160, 0, 9, 9),
    ("vitamin_small_224", 224, 0, 14, 13),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "nchw", "channel_last", "left"), FAMILIES)
def test_sites_of_family(name: str, size: int, nchw: int, channel_last: int, left: int) -> None:
    with torch.device("meta"):
        built = create_vision_model(name, "polynorm", num_classes=10, image_size=size)
    dims = Counter(site.dim for site in built.sites)
    assert (dims.pop(1, 0), dims.pop(-1, 0), len(built.leftovers)) == (nchw, channel_last, left)
    assert not dims


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "convnext_atto",
        "densenet121",
        "efficientnet_b0",
        "levit_128s",
        "mobilenetv3_small_050",
        "mobilevit_xxs",
        "regnety_002",
        "resnet50",
        "vit_tiny_patch16_224",
        "xcit_nano_12_p8_224",
    ],
)
def test_small_images_change_no_dimension(name: str) -> None:
    """On 64 pixels the last maps are 2x2 or 1x1, and token counts can equal feature counts."""
    with torch.device("meta"):
        large, small = (
            create_vision_model(name, "polynorm", num_classes=10, image_size=size).sites
            for size in (224, 64)
        )
    assert small == large
