"""Small runs that take seconds."""

import signal

import pytest

from polyvision.data.text.file import load_book
from polyvision.training.config.compose import compose
from polyvision.training.loop.module import TaskModule
from polyvision.training.session import run_task


@pytest.fixture(autouse=True)
def _ctrl_c_arrives():
    """Undo what a shell does to programs that it starts with ``&``: they ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def small_text(tmp_path_factory):
    """A file with the first 24 kB of the built-in book."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(load_book()[:24000], encoding="utf-8")
    return path


@pytest.fixture
def overrides(small_text, tmp_path):
    """Overrides of a run that takes seconds, by task."""
    common = [f"run_root={tmp_path}/runs", "trainer.accelerator=cpu", "data.workers=0"]
    return {
        "vision": [
            *common,
            "model=timm",
            "model.name=test_resnet",
            "data=fake",
            "data.options.samples=160",
            "data.options.classes=4",
            "data.options.source_size=40",  # 256 by default, which takes longer than training
            "data.image_size=32",
            "recipe.batch_size=16",
            "recipe.warmup_epochs=0",
            "trainer.log_every_n_steps=1",
        ],
        "language": [
            *common,
            "data=text",
            f"data.path={small_text}",
            "data.tokenizer=bytes",
            "model.width=32",
            "model.layers=1",
            "model.heads=2",
            "model.ffn_hidden=96",
            "model.context=32",
            "recipe.batch_size=32",
            "recipe.warmup_epochs=0",
            "trainer.log_every_n_steps=1",
        ],
    }


@pytest.fixture
def train(overrides):
    """Train in this process; returns the summary."""

    def run(task, *more):
        import importlib

        domain = importlib.import_module(f"polyvision.training.tasks.{task}")
        given = [*overrides[task], *more]
        (config,) = compose(task, given)
        return run_task(config, domain.build_task, given)

    return run


@pytest.fixture
def break_at(monkeypatch):
    """Let the next run fail after a number of optimizer steps, as a kill would."""

    def install(step):
        original = TaskModule.training_step

        def failing(self, batch, batch_idx):
            if self.global_step == step:
                raise RuntimeError("killed")
            return original(self, batch, batch_idx)

        monkeypatch.setattr(TaskModule, "training_step", failing)
        return lambda: monkeypatch.setattr(TaskModule, "training_step", original)

    return install
