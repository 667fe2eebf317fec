"""Paths of a configuration, as seen from the folder that the command was started in.

Hydra can start a run in a folder of its own (``hydra.job.chdir=true``).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from polyvision.training.config.schema import (
    AnyConfig,
    DataConfig,
    ImageDataConfig,
    TextDataConfig,
)

__all__ = ["from_folder"]


def from_folder(config: AnyConfig, folder: Path) -> AnyConfig:
    """Return the configuration with relative paths of files to read taken from ``folder``.

    Where the current folder is that one, nothing changes. Runs are written where ``run_root`` leads
    from the current folder, which is what Hydra was asked for.
    """
    if folder.absolute() == Path.cwd():
        return config
    resume = config.resume if config.resume == "auto" else _path(config.resume, folder)
    return dataclasses.replace(
        config,
        data=_data(config.data, folder),
        resume=resume,
        finetune=_path(config.finetune, folder),
        validate=_path(config.validate, folder),
        validate_output=_path(config.validate_output, folder),
        plugins=[str(_name_or_path(plugin, folder)) for plugin in config.plugins],
    )


def _data(data: DataConfig, folder: Path) -> DataConfig:
    if isinstance(data, ImageDataConfig):
        options = dict(data.options)
        if isinstance(options.get("dataset"), str):
            options["dataset"] = _name_or_path(options["dataset"], folder)
        return dataclasses.replace(data, root=_path(data.root, folder), options=options)
    if isinstance(data, TextDataConfig):
        return dataclasses.replace(
            data,
            path=_path(data.path or ("." if data.mix else None), folder),
            tokenizer=_name_or_path(data.tokenizer, folder),
            val={name: str(_path(place, folder)) for name, place in data.val.items()},
        )
    return data


def _path(path: str | None, folder: Path) -> str | None:
    """Return the path from ``folder``; an absolute one, or one from the home folder, stays."""
    return None if path is None else str(folder / Path(path).expanduser())


def _name_or_path(value: str | None, folder: Path) -> str | None:
    """Return the path from ``folder`` where there is one, for a value that may be a name too."""
    if value is None or not (folder / Path(value).expanduser()).exists():
        return value
    return _path(value, folder)
