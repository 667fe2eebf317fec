"""TensorBoard as a reader finds it: tags, overlay charts, hparams, the text card, figures."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from polyvision.activations import create_activation
from polyvision.analysis.figures import SITES_PER_FIGURE, activation_curves, site_curve
from polyvision.training.logging import activation_monitor as monitor
from polyvision.training.logging.tensorboard import (
    Board,
    overlay_layout,
    run_card,
    tag_in_tensorboard,
)
from polyvision.training.loop.module import TaskModule

SHORT = ["trainer.max_steps=2"]


def events(tmp_path, act, seed=0):
    (folder,) = tmp_path.glob(f"runs/*/*/*/{act}/seed{seed}")
    return EventAccumulator(str(folder), {"histograms": 0, "images": 0}).Reload()


def hparams(accumulator):
    """The settings, the metric tags and the status (1 success, 2 failure, None) of a run."""
    found = {
        tag.rsplit("/", 1)[1]: HParamsPluginData.FromString(content)
        for tag, content in accumulator.PluginTagToContent("hparams").items()
    }
    settings = {
        name: value.number_value if value.HasField("number_value") else value.string_value
        for name, value in found["session_start_info"].session_start_info.hparams.items()
    }
    metrics = [info.name.tag for info in found["experiment"].experiment.metric_infos]
    end = found.get("session_end_info")
    return settings, metrics, end.session_end_info.status if end else None


def layout(accumulator):
    (event,) = accumulator.Tensors("custom_scalars__config__")
    made = Layout.FromString(event.tensor_proto.string_val[0])
    return {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in made.category
    }


@pytest.fixture
def failing_step(monkeypatch):
    """Let a run fail at its second step."""
    original = TaskModule.training_step

    def failing(self, batch, batch_idx):
        if self.global_step == 1:
            raise RuntimeError("broken")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TaskModule, "training_step", failing)
    return lambda: monkeypatch.setattr(TaskModule, "training_step", original)


def test_tags_are_the_same_for_all_activations_and_both_tasks(train, tmp_path):
    tags = {}
    for task, rival in (("vision", "relu"), ("language", "swiglu")):
        for act in ("polynorm", rival):
            train(task, *SHORT, f"act={act}", f"run_root={tmp_path}/{task}/runs")
            found = events(tmp_path / task, act).Tags()
            scalars = {t for t in found["scalars"] if not t.startswith("z_act/")}
            assert ("sample/text_summary" in found["tensors"]) == (task == "language")
            tags[task, act] = (scalars, found["histograms"], found["images"])
            inputs = {t.removesuffix("/input") for t in found["histograms"] if t.endswith("input")}
            outputs = {t.removesuffix("/output") for t in found["histograms"] if t.endswith("put")}
            assert inputs
            assert inputs == {t for t in outputs if not t.endswith("/input")}
        assert tags[task, "polynorm"] == tags[task, rival]
    vision, language = (tags[key][0] for key in (("vision", "relu"), ("language", "swiglu")))
    assert vision - language == {"val/acc1", "val/acc5"}
    text = {"train/ppl", "train/bpb", "train/tokens", "val/ppl", "val/bpb", "x_perf/tokens_per_s"}
    assert language - vision == text


def test_overlay_charts_find_their_tags_in_every_run(train, tmp_path):
    for act in ("relu", "polynorm"):
        train("vision", *SHORT, f"act={act}")
    charts = {act: layout(events(tmp_path, act)) for act in ("relu", "polynorm")}
    assert charts["relu"]["training"] == charts["polynorm"]["training"]
    # TensorBoard adds charts only to categories that the first run has.
    assert charts["relu"]["coefficients"] == {}
    assert list(charts["polynorm"]["coefficients"]) == ["bias", "weight_1", "weight_2", "weight_3"]
    tags = events(tmp_path, "polynorm").Tags()["scalars"]
    for category in charts["polynorm"].values():
        for title, patterns in category.items():
            matched = [tag for tag in tags for pattern in patterns if re.match(pattern, tag)]
            assert matched, title
            if title in {"training loss", "val/acc1"}:
                assert len(matched) == 1


def test_a_chart_of_the_first_weight_leaves_the_tenth_out():
    (pattern,) = overlay_layout([], ["weight_1"])["coefficients"]["weight_1"][1]
    for group in ("z_act", "act"):  # "act" in the event files of earlier versions
        assert re.match(pattern, f"{group}/layer1.0/weight_1")
        assert not re.match(pattern, f"{group}/layer1.0/weight_10")


def test_training_and_validation_are_the_groups_that_open(train, tmp_path):
    train("language", *SHORT, "model=moe_tiny", "recipe.ema_decay=0.9", "analysis.every_n_steps=1")
    tags = events(tmp_path, "polynorm").Tags()
    tags = {*tags["scalars"], *tags["images"], *tags["histograms"]}
    groups = sorted({tag.partition("/")[0] for tag in tags if "/" in tag})
    after = ["x_analysis", "x_optim", "x_perf", "x_router", "z_act"]
    assert groups == ["train", "val", "val_ema", *after]
    # The names in metrics.jsonl, which comparisons read, do not depend on TensorBoard.
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    written = {tag for line in metrics.read_text().splitlines() for tag in json.loads(line)}
    written -= {"step"}
    kept = {"train", "val", "val_ema", "analysis", "optim", "perf", "router", "act"}
    assert {tag.partition("/")[0] for tag in written} == kept
    assert {tag_in_tensorboard(tag) for tag in written} <= tags


def test_charts_show_runs_of_earlier_versions_too():
    charts = overlay_layout(["val/loss"], [])["training"]
    (pattern,) = charts["gradient norm"][1]
    assert [bool(re.match(pattern, t)) for t in ("x_optim/grad_norm", "optim/grad_norm")] == [1, 1]
    assert charts["val/loss"][1] == ["val/loss$"]


def test_hparams_hold_settings_and_metrics(train, tmp_path):
    train("vision", *SHORT, "seed=3", "act=polynorm", "act.order=2")
    found = events(tmp_path, "polynorm-order2", seed=3)
    settings, metrics, status = hparams(found)
    assert settings["act"] == "polynorm-order2"
    assert settings["model"] == "test_resnet"
    assert settings["data"] == "fake"
    assert settings["seed"] == 3.0
    assert status == 1
    assert {"val/loss", "val/acc1", "val/acc5", "train/loss"} <= set(metrics)
    assert set(metrics) <= set(found.Tags()["scalars"])


def test_hparams_of_failed_and_resumed_runs(train, tmp_path, failing_step):
    arguments = ["language", "trainer.max_steps=3", "trainer.checkpoint_every_n_steps=1"]
    with pytest.raises(RuntimeError, match="broken"):
        train(*arguments)
    failed = hparams(events(tmp_path, "polynorm"))
    assert failed[2] == 2
    failing_step()
    train(*arguments, "resume=auto")
    resumed = hparams(events(tmp_path, "polynorm"))
    assert resumed[2] == 1
    assert failed[:2] == resumed[:2]
    assert failed[0]["act"] == "polynorm"


def test_a_killed_run_has_its_row_and_card(train, tmp_path):
    train("language", *SHORT)
    for end in tmp_path.rglob("*.end"):  # all that a killed process could not write
        end.unlink()
    found = events(tmp_path, "polynorm")
    settings, metrics, status = hparams(found)
    assert (settings["seed"], status) == (0.0, None)
    assert "val/loss" in metrics
    assert found.Tensors("run/text_summary")


def test_card_tells_command_plan_and_environment(train, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/train_lm.py", "act=polynorm", "data.path=a b"])
    train("language", *SHORT)
    (event,) = events(tmp_path, "polynorm").Tensors("run/text_summary")
    card = event.tensor_proto.string_val[0].decode()
    assert card.startswith("    train_lm.py act=polynorm 'data.path=a b'\n\n|")
    assert f"| torch | {torch.__version__} |" in card
    assert "| activation | polynorm in 1 feed-forward network |" in card


def test_what_no_locale_could_read_is_written(tmp_path):
    board = Board(tmp_path / "run", purge_step=None)
    board.describe({"data": "b\udcc3\udcbcch", "seed": 1}, ["val/loss"], "of b\udcc3\udcbcch", 0)
    accumulator = EventAccumulator(str(tmp_path / "run")).Reload()
    (card,) = accumulator.Tensors("run/text_summary")
    assert card.tensor_proto.string_val[0].decode() == "of b\u00fcch"


def test_card_survives_a_pipe_and_no_repository():
    card = run_card({"command": ["x"], "git": None, "gpus": []}, [("a", "b | c")])
    assert card.endswith("| a | b &#124; c |\n| git | unknown |\n| gpus | none |\n")


def test_curves_come_at_powers_of_two_and_at_the_end(train, tmp_path):
    train("language", "trainer.max_steps=6", "trainer.val_every_n_steps=1")
    found = events(tmp_path, "polynorm")
    assert [image.step for image in found.Images("z_act/curves")] == [1, 2, 4, 6]
    histogram = found.Histograms("z_act/blocks.0.ffn.activation/output")
    assert [event.step for event in histogram] == [1, 2, 3, 4, 5, 6]


def test_initial_curve_is_that_before_training_also_after_a_resume(
    train, monkeypatch, failing_step
):
    seen = []

    def spy(modules, initial, rows):
        sites = [dict(m)["blocks.0.ffn.activation"] for m in (modules, initial)]
        seen.append([site.weight.tolist() for site in sites])
        return []

    monkeypatch.setattr(monitor, "activation_curves", spy)
    arguments = ["language", "trainer.max_steps=3", "trainer.checkpoint_every_n_steps=1"]
    with pytest.raises(RuntimeError, match="broken"):
        train(*arguments)
    failing_step()
    train(*arguments, "resume=auto")
    ((learned, initial),) = seen
    assert initial == pytest.approx([1 / 3] * 3)
    assert learned != pytest.approx([1 / 3] * 3)


def test_curve_of_a_normalising_site_follows_the_formula():
    module = create_activation("polynorm", dim=1)
    initial = create_activation("polynorm", dim=1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.5, -0.2, 0.1]))
        module.bias.fill_(0.3)
    rows = torch.randn(5, 32) * torch.tensor([1.0, 5.0, 2.0, 4.0, 3.0])[:, None]
    curve = site_curve(module, initial, rows)
    x = rows[rows.square().mean(1).argsort()[2]].sort().values
    assert torch.equal(curve.x, x)
    x = x.double()
    terms = [x**i / (x ** (2 * i)).mean().add(1e-6).sqrt() for i in (1, 2, 3)]
    expected = 0.5 * terms[0] - 0.2 * terms[1] + 0.1 * terms[2] + 0.3
    torch.testing.assert_close(curve.learned.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(curve.initial.double(), sum(terms) / 3, rtol=1e-5, atol=1e-6)


def test_curve_of_a_pointwise_site_spans_all_its_inputs():
    module = create_activation("relu2")
    curve = site_curve(module, module, torch.tensor([[-1.0, 0.5], [3.0, 0.0]]))
    assert (float(curve.x[0]), float(curve.x[-1]), len(curve.x)) == (-1.0, 3.0, 101)
    torch.testing.assert_close(curve.learned, curve.x.clamp(min=0) ** 2)


def test_curve_of_a_gated_site_runs_along_the_gate():
    module = create_activation("swiglu")
    curve = site_curve(module, module, torch.tensor([[-2.0, 2.0]]))
    torch.testing.assert_close(curve.learned, torch.nn.functional.silu(curve.x))


def test_curve_of_a_gated_site_with_coefficients_for_each_expert_shows_the_first():
    module = create_activation("polynorm_glu", groups=2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 5.0, 5.0]]))
    curve = site_curve(module, module, torch.tensor([[3.0, -4.0]]))
    assert curve.x.tolist() == [-4.0, 3.0]
    torch.testing.assert_close(curve.learned, curve.x / 12.5**0.5)


def test_curve_of_a_site_that_tells_features_apart_keeps_their_places():
    module = create_activation("radial_bounding")
    curve = site_curve(module, module, torch.tensor([[3.0, 0.1, 4.0, 0.2]]))
    assert curve.x.tolist() == pytest.approx([0.1, 0.2, 3.0, 4.0])
    pairs = module(torch.tensor([[3.0, 0.1, 4.0, 0.2]]))[0, [1, 3, 0, 2]]
    torch.testing.assert_close(curve.learned, pairs)


def test_of_long_parameters_mean_and_extremes_are_logged():
    site = create_activation("normsilu", features=100)
    with torch.no_grad():
        site.gain.copy_(torch.arange(100.0))
    logged = {}
    trainer = SimpleNamespace(
        is_global_zero=True,
        global_step=1,
        loggers=[SimpleNamespace(log_metrics=lambda values, step: logged.update(values))],
    )
    logging = monitor.ActivationMonitor(histograms=False, total_steps=1, shown=[])
    logging._log_coefficients(trainer, SimpleNamespace(model=torch.nn.Sequential(site)))
    assert logged == {"act/0/gain_mean": 49.5, "act/0/gain_min": 0.0, "act/0/gain_max": 99.0}


def test_every_site_is_drawn_once():
    count = SITES_PER_FIGURE + 1
    sites = {f"site{i}": create_activation("relu") for i in range(count)}
    rows = {name: torch.randn(2, 4) for name in sites}
    rows["site3"][0, 0] = torch.nan
    figures = activation_curves(sites, sites, rows)
    (figure,) = figures
    drawn = [text.get_text() for text in figure.axes[0].texts]
    names = [text for text in drawn if text.startswith("site")]
    assert sorted(names) == sorted(set(sites) - {"site3"})
    lines = {line.get_label(): line for line in figure.axes[0].collections}
    assert len(lines["learned"].get_segments()) == len(names)
    rows["site3"] = torch.zeros(2, 4)  # constant
    assert len(activation_curves(sites, sites, rows)) == 2
    assert activation_curves(sites, sites, {}) == []
