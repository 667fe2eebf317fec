"""The recipes of published results, key by key against what their sources state."""

import pytest

from polyvision.training.config.compose import compose

ROOT = "data.root=images"
NOTHING = {"mix.mixup": 0, "mix.cutmix": 0, "drop_path": 0, "repeats": 1, "augment.erase": 0}
PLAIN = NOTHING | {"augment.auto_augment": None, "ema_decay": None, "clip_grad": None, "drop": 0}
CROP = {"augment.crop_scale": [0.08, 1.0], "augment.hflip": 0.5}
RSB = CROP | {
    "batch_size": 2048,
    "optimizer": "lamb",
    "schedule": "cosine",
    "warmup_epochs": 5,
    "loss": "bce",
    "mix.cutmix": 1.0,
    "mix.prob": 1.0,
    "mix.switch_prob": 0.5,
    "decay_norm_and_bias": False,
    "ema_decay": None,
    "clip_grad": None,
    "augment.color_jitter": 0,
    "augment.erase": 0,
}
TIMM = PLAIN | CROP
TIMM |= {"optimizer": "sgd", "lr": 0.1, "lr_base_batch": 256, "lr_scaling": "linear"}
TIMM |= {"weight_decay": 2e-5, "schedule": "cosine", "warmup_epochs": 5, "warmup_lr": 1e-5}
TIMM |= {"min_lr": 0, "label_smoothing": 0.1, "loss": "ce", "augment.color_jitter": 0.4}
TIMM |= {"decay_norm_and_bias": False}

RECIPES = {
    # https://github.com/pytorch/vision/tree/main/references/classification, the script's defaults
    "rn50_tv90": PLAIN
    | CROP
    | {
        "epochs": 90,
        "batch_size": 256,
        "optimizer": "momentum",
        "lr": 0.1,
        "weight_decay": 1e-4,
        "decay_norm_and_bias": True,
        "schedule": "step",
        "schedule_options": {"decay_epochs": 30, "decay_rate": 0.1},
        "warmup_epochs": 0,
        "label_smoothing": 0,
        "loss": "ce",
        "augment.color_jitter": 0,
    },
    # https://github.com/huggingface/pytorch-image-models, train.py
    "rn50_timm_default": TIMM | {"epochs": 300, "batch_size": 128},
    "rn50_polycom": TIMM | {"epochs": 100, "batch_size": 256},
    # Wightman et al. 2021, https://arxiv.org/abs/2110.00476, table 2
    "rn50_rsb_a1": RSB
    | {
        "epochs": 600,
        "lr": 5e-3,
        "weight_decay": 0.01,
        "label_smoothing": 0.1,
        "mix.mixup": 0.2,
        "drop_path": 0.05,
        "repeats": 3,
        "augment.auto_augment": "rand-m7-mstd0.5-inc1",
    },
    "rn50_rsb_a2": RSB
    | {
        "epochs": 300,
        "lr": 5e-3,
        "weight_decay": 0.02,
        "label_smoothing": 0,
        "mix.mixup": 0.1,
        "drop_path": 0.05,
        "repeats": 3,
        "augment.auto_augment": "rand-m7-mstd0.5-inc1",
    },
    "rn50_rsb_a3": RSB
    | {
        "epochs": 100,
        "lr": 8e-3,
        "weight_decay": 0.02,
        "label_smoothing": 0,
        "mix.mixup": 0.1,
        "drop_path": 0,
        "repeats": 1,
        "augment.auto_augment": "rand-m6-mstd0.5-inc1",
    },
    # DeVries and Taylor 2017, https://arxiv.org/abs/1708.04552, section 4.1
    "cifar_rn18": PLAIN
    | {
        "epochs": 200,
        "batch_size": 128,
        "optimizer": "sgd",
        "lr": 0.1,
        "weight_decay": 5e-4,
        "schedule": "multistep",
        "schedule_options": {"decay_milestones": [60, 120, 160], "decay_rate": 0.2},
        "augment.hflip": 0.5,
        "augment.translate": 4 / 32,
        "decay_norm_and_bias": True,
    },
}
# Training and test size, crop, interpolation, top-1 by activation.
DATA = {
    "rn50_tv90": (224, None, 0.875, "bilinear", {"relu": 0.7613}),
    "rn50_timm_default": (224, None, 0.95, "random", None),
    "rn50_polycom": (224, None, 0.95, "random", {"polynorm": 0.75117, "relu": 0.74913}),
    "rn50_rsb_a1": (224, None, 0.95, "bicubic", {"relu": 0.804}),
    "rn50_rsb_a2": (224, None, 0.95, "bicubic", {"relu": 0.798}),
    "rn50_rsb_a3": (160, 224, 0.95, "bicubic", {"relu": 0.781}),
    "cifar_rn18": (32, None, 1.0, "bicubic", {"relu": 0.9528}),
}


def at(recipe, key):
    for part in key.split("."):
        recipe = recipe[part]
    return recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_published_one(name):
    (config,) = compose("vision", [f"experiment={name}", ROOT])
    recipe = config.plain()["recipe"]
    assert {key: at(recipe, key) for key in RECIPES[name]} == RECIPES[name]
    data, target = config.data, config.experiment.target
    found = (data.image_size, data.test_size, data.crop_pct, data.interpolation)
    assert (*found, target and target.value) == DATA[name]
    assert config.model.name == ("resnet18_small" if name == "cifar_rn18" else "resnet50")
    assert not config.model.pretrained
