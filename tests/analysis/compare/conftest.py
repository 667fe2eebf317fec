"""Run folders written by hand, so that every state a run can be in takes no training."""

import json
import os
import socket

import pytest
import yaml

STEPS = (2, 4)


def config(act, seed, **changes):
    """A resolved configuration; ``changes`` are dotted keys with __ for the dot."""
    made = {
        "task": "vision",
        "model": {"task": "vision", "name": "resnet10t", "options": {}},
        "act": {"name": act, "options": {"order": 3} if act == "polynorm" else {}},
        "data": {"name": "digits", "workers": 0, "root": None},
        "recipe": {"name": "short", "lr": 0.1, "epochs": 2},
        "trainer": {"max_steps": 4, "log_every_n_steps": 1},
        "seed": seed,
        "precision": "32",
        "run_root": "runs",
    }
    for key, value in changes.items():
        *groups, leaf = key.split("__")
        node = made
        for group in groups:
            node = node[group]
        node[leaf] = value
    return made


@pytest.fixture
def write_run(tmp_path):
    """Write a run folder; returns its path."""

    def write(
        act,
        seed,
        accuracies=(0.5, 0.8),
        *,
        name=None,
        steps=STEPS,
        state=None,
        environment=None,
        tail="",
        **changes,
    ):
        folder = tmp_path / "runs" / act / (name or f"seed{seed}")
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(
            yaml.safe_dump(config(act, seed, **changes)), encoding="utf-8"
        )
        record = {
            "state": "finished",
            "error": None,
            "step": 4,
            "resumed_at": [],
            "process": os.getpid(),
            "host": socket.gethostname(),
            "settings": {"act": act, "seed": seed, "parameters": 1000 + len(act)},
            "monitor": "val/acc1",
            "total_steps": 4,
            "activation_bytes": 2**20,
        }
        (folder / "state.json").write_text(json.dumps(record | (state or {})), encoding="utf-8")
        described = {"torch": "2.0", "threads": 1, "git": {"commit": "abc", "changed": False}}
        (folder / "environment.json").write_text(
            json.dumps(described | (environment or {})), encoding="utf-8"
        )
        rows = []
        for step, accuracy in zip(steps, accuracies, strict=False):
            rows += [{"step": s, "train/loss": 1.0 / s} for s in (step - 1, step)]
            rows[-1]["perf/samples_per_s"] = 100.0 + step
            rows.append({"step": step, "val/acc1": accuracy, "val/loss": 1 - accuracy})
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / "metrics.jsonl").write_text(lines + tail, encoding="utf-8")
        return folder

    return write
