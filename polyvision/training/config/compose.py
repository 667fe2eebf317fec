"""From overrides to a typed configuration, with every problem reported in one error.

Hydra composes the groups: the files of ``configs/``, the group ``act`` from the activation
registry, and the defaults of ``schema`` as the base of each group. Hydra would stop at the first
unknown key, so it is told to add every key, and ``schema`` says afterwards which there are.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_type_hints, overload

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from polyvision import configs
from polyvision.errors import PolyvisionError, some, unknown
from polyvision.training.config import schema
from polyvision.training.config.overrides import choices, parse, readable
from polyvision.typed import load, with_defaults

__all__ = [
    "CONFIG_MODULE",
    "SCRIPTS",
    "Task",
    "check_keys",
    "completed",
    "compose",
    "config_from_plain",
    "for_hydra",
    "help_text",
    "register_groups",
    "typed_config",
]

CONFIG_MODULE = "polyvision.configs"
SCRIPTS = {"vision": "train_vision", "language": "train_lm"}
Task = Literal["vision", "language"]
_CONFIGS: dict[Any, type[schema.Config]] = {
    "vision": schema.VisionConfig,
    "language": schema.LanguageConfig,
}
_USUAL_ACT = "polynorm"  # of both scripts


def register_groups(activations: Iterable[str] | None = None) -> None:
    """Offer Hydra the defaults of the schema, and activations with their options.

    Args:
        activations: names; None: all that are registered.
    """
    from polyvision.activations import activation_info, activation_names

    _register_defaults()
    for name in activation_names() if activations is None else activations:
        options = dataclasses.asdict(activation_info(name).options())
        _store("act", name, {"name": name, **options})


def _register_defaults() -> None:
    """Offer Hydra the defaults of the schema, and the usual activation without its options."""
    for task, cls in _CONFIGS.items():
        kinds = get_type_hints(cls)
        _store("base", task, with_defaults(cls, {}))
        for group in ("model", "data", "recipe"):
            _store(f"{group}/base", task, with_defaults(kinds[group], {}))
        for group in ("trainer", "analysis"):
            _store(f"{group}/base", "default", with_defaults(kinds[group], {}))
    _store("act", _USUAL_ACT, {"name": _USUAL_ACT})


def _store(group: str, name: str, node: dict[str, Any]) -> None:
    ConfigStore.instance().store(group=group, name=name, node=node)


@overload
def compose(task: Literal["vision"], overrides: list[str]) -> list[schema.VisionConfig]: ...
@overload
def compose(task: Literal["language"], overrides: list[str]) -> list[schema.LanguageConfig]: ...
def compose(task: Task, overrides: list[str]) -> list[Any]:
    """Compose and check one configuration for each combination that ``overrides`` ask for.

    Args:
        task: ``vision`` or ``language``.
        overrides: Hydra overrides, ``key=value``; ``key=a,b`` makes one run for each value.

    Raises:
        PolyvisionError: one text with a line for each problem of any of the combinations.
    """
    _load_plugins(overrides)
    problems: list[str] = []
    with _hydra():
        found = _composed(task, overrides, problems)
    if problems:
        raise _error(problems)
    return found


def check_keys(task: Task, overrides: list[str]) -> None:
    """Check what ``compose`` does except the values, which may still be missing.

    Raises:
        PolyvisionError: one text with a line for each key or choice that does not exist.
    """
    _load_plugins(overrides)
    problems: list[str] = []
    with _hydra():
        _composed(task, overrides, problems)
    problems = [line for line in problems if line.startswith(("unknown ", "cannot read "))]
    if problems:
        raise _error(problems)


def help_text(task: Task, overrides: list[str]) -> str:
    """Return what ``--help`` prints: the groups with their choices, and the configuration.

    Hydra's own text takes as long as composing ten configurations: it lists each group anew.
    """
    _load_plugins(overrides)
    parsed = parse(overrides)
    _register_asked(parsed)
    opened = [for_hydra(override, choices(override)[0]) for override in parsed]
    with _hydra():
        node = hydra_compose(SCRIPTS[task], opened, return_hydra_config=True)
    header, footer = node.hydra.help.header, node.hydra.help.footer
    OmegaConf.set_struct(node, False)
    del node["hydra"]
    groups = "\n".join(f"{g}: {', '.join(_names(g))}" for g in sorted(["act", *_files()]))
    return (
        f"{header}\n== Configuration groups ==\nChoose with group=name\n\n{groups}\n\n"
        f"== Config ==\nChange with key=value\n\n{OmegaConf.to_yaml(node)}\n{footer}"
    )


def _load_plugins(overrides: list[str]) -> None:
    if any(text.startswith("plugins=") for text in overrides):  # torch comes with them
        from polyvision.activations.plugins import load_plugins, plugins_of

        load_plugins(plugins_of(overrides))


@contextmanager
def _hydra() -> Iterator[None]:
    """Let Hydra find the groups; ``hydra.main`` may be running in this process already."""
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            yield
    finally:
        if state is not None:
            GlobalHydra.instance().initialize(state)


def _composed(task: Task, overrides: list[str], problems: list[str]) -> list[schema.Config]:
    """Return the configuration of each combination that fits; the rest adds to ``problems``."""
    parsed = [o for o in readable(overrides, problems) if _choice_exists(o, problems)]
    # Torch is imported only where an activation is asked for, or all else is right.
    act_given = any("act" in text for text in overrides)
    _register_asked(parsed) if act_given else _register_defaults()
    found = []
    for lines in itertools.product(*map(choices, parsed)):
        opened = [for_hydra(override, line) for override, line in zip(parsed, lines, strict=True)]
        try:
            values = _plain(hydra_compose(SCRIPTS[task], opened))
        except (HydraException, PolyvisionError) as error:
            problems.append(" ".join(str(error).split()))
            continue
        config = _typed(values, problems, check_act=act_given)
        if config is not None:
            found.append(config)
    return found


def _register_asked(overrides: list[Override]) -> None:
    """Offer Hydra the activations that overrides choose from."""
    asked = [v for o in overrides if o.key_or_group == "act" for v in _values(o)]
    register_groups([_USUAL_ACT, *asked])


def for_hydra(override: Override, line: str) -> str:
    """Write an override so that Hydra adds a key that it does not know."""
    key = override.key_or_group
    if _is_group(key) or key.startswith("hydra") or override.is_delete():
        return line
    return f"++{line.lstrip('+')}"


def _plain(node: DictConfig) -> dict[str, Any]:
    try:
        values: Any = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise PolyvisionError(f"{error.full_key}: cannot resolve ${{...}}: {text}") from error
    return dict(values)


def typed_config(composed: DictConfig) -> schema.Config:
    """Turn a configuration that Hydra composed into its typed form.

    Raises:
        PolyvisionError: one text with a line for each value that does not fit.
    """
    return _checked(_plain(composed))


def config_from_plain(values: Mapping[str, Any]) -> schema.Config:
    """Turn the content of a run's config.yaml, which is ``Config.plain()``, into its typed form.

    Raises:
        PolyvisionError: one text with a line for each value that does not fit.
    """
    act = values["act"]
    return _checked({**values, "act": {"name": act["name"], **act["options"]}})


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add to the content of a run's config.yaml the keys that its version did not have."""
    from polyvision.activations import activation_info

    act = values["act"]
    options = with_defaults(activation_info(str(act["name"])).options, act["options"])
    cls = _CONFIGS.get(values.get("task"), schema.Config)
    return {**with_defaults(cls, values), "act": {"name": act["name"], "options": options}}


def _checked(values: Mapping[str, Any]) -> schema.Config:
    problems: list[str] = []
    config = _typed(values, problems)
    if config is None:
        raise _error(problems)
    return config


def _typed(
    values: Mapping[str, Any], problems: list[str], *, check_act: bool = True
) -> schema.Config | None:
    """Return the typed configuration, or None where something was added to ``problems``.

    Args:
        values: plain values; those of ``act`` are its name and options side by side.
        problems: receives one line for each value that does not fit.
        check_act: look at the activation although something else does not fit.
    """
    task: Any = values.get("task")
    cls = _CONFIGS.get(task)
    if cls is None:
        problems.append(str(unknown("task", str(task), _CONFIGS)))
        return None
    if wrong := _wrong_groups(cls, values):
        problems.extend(wrong)
        return None
    before = len(problems)
    known = {field.name for field in dataclasses.fields(cls)}
    problems.extend(_unknown_key(key, values, known) for key in values if key not in known)
    options = dict(values["act"])
    name = str(options.pop("name", None))
    given = {key: value for key, value in values.items() if key in known}
    config = load(cls, {**given, "act": {"name": name, "options": options}}, "", problems)
    act = None
    if check_act or len(problems) == before:
        act = _activation(task, name, options, problems)
    return dataclasses.replace(config, act=act) if config and act else None


def _wrong_groups(cls: type[schema.Config], values: Mapping[str, Any]) -> list[str]:
    """Say which groups are missing or belong to the other task."""
    groups = [f.name for f in dataclasses.fields(cls) if _is_group(f.name)]
    missing = [
        f"{g} is missing: choose {g}=<name>"
        for g in groups
        if g != "experiment" and not isinstance(values.get(g), Mapping)
    ]
    if missing:
        return missing
    experiment = values.get("experiment")
    if isinstance(experiment, Mapping) and "name" not in experiment:
        return [f"experiment.{key}: experiment is None here" for key in experiment]
    task: Any = values["task"]
    other = [g for g in groups if (values.get(g) or {}).get("task", task) != task]
    if "experiment" in other:  # which chose the others
        other = ["experiment"]
    return [_wrong_task(task, group, values[group]) for group in other]


def _unknown_key(key: str, values: Mapping[str, Any], known: set[str]) -> str:
    """Name the group that has the key, or the nearest key; torch only where neither is clear."""
    nodes = {k: v for k, v in values.items() if k in known and isinstance(v, Mapping)}
    elsewhere = [f"{group}.{key}" for group, node in nodes.items() if key in node]
    if not elsewhere and not difflib.get_close_matches(key, known, cutoff=0.75):
        from polyvision.activations import activation_info, activation_names

        name = values["act"].get("name")
        if name in activation_names() and key in get_type_hints(activation_info(name).options):
            elsewhere = [f"act.{key}"]
    if elsewhere:
        return f"unknown key {key!r}. Did you mean {some(elsewhere)}?"
    return str(unknown("key", key, known))


def _activation(
    task: Task, name: str, given: Mapping[str, Any], problems: list[str]
) -> schema.ActivationConfig | None:
    from polyvision.activations import activation_info, activation_names, create_activation

    try:
        info = activation_info(name)
    except PolyvisionError as error:
        problems.append(str(error))
        return None
    needs = {
        "gated": "is gated: it takes two inputs",
        "mixture": "is a mixture: it takes the token too",
    }
    if task == "vision" and info.kind in needs:
        valid = ", ".join(n for n in activation_names() if activation_info(n).kind not in needs)
        problems.append(
            f"act={name} {needs[info.kind]} and fits only the feed-forward network "
            f"of a language model. Choose act= one of: {valid}"
        )
    if given and not dataclasses.fields(info.options):
        problems.extend(f"unknown key 'act.{key}': act={name} has no options" for key in given)
        return None
    options = load(info.options, given, "act", problems)
    if options is None:
        return None
    values = dataclasses.asdict(options)
    try:
        create_activation(name, **values)
    except ValueError as error:
        problems.append(f"act={name}: {error}")
    return schema.ActivationConfig(name, values)


def _wrong_task(task: Task, group: str, node: Mapping[str, Any]) -> str:
    other, choice = node["task"], node["name"]
    valid = [name for name in _names(group) if _task_of(group, name) in (None, task)]
    return (
        f"{group}={choice} is for {other}, not for {task}: run `python {SCRIPTS[other]}.py "
        f"{group}={choice}`, or choose {group}= one of: {', '.join(valid)}"
    )


def _task_of(group: str, name: str) -> str | None:
    """Return the task that a file is for; None for both."""
    file = Path(configs.__file__).parent / group / f"{name}.yaml"
    text = file.read_text(encoding="utf-8")
    return next((t for t in _CONFIGS if f"base/{t}@" in text or f"task: {t}" in text), None)


def _error(problems: list[str]) -> PolyvisionError:
    return PolyvisionError("\n".join(dict.fromkeys(problems)))


@lru_cache(maxsize=1)
def _files() -> dict[str, list[str]]:
    """Map each group of ``configs/`` to its files."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(configs.__file__).parent.glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return {group: names for group, names in found.items() if group != "hydra"}


def _names(group: str) -> list[str]:
    """Return the choices of a group."""
    if group != "act":
        return _files()[group]
    from polyvision.activations import activation_names

    return activation_names()


def _is_group(key: str) -> bool:
    return key == "act" or key in _files()


def _choice_exists(override: Override, problems: list[str]) -> bool:
    group = override.key_or_group
    if not _is_group(group):
        return True
    wrong = [name for name in _values(override) if name not in _names(group)]
    hint = ""
    if group == "act" and wrong:
        from polyvision.activations.registry import own_activation

        hint = own_activation()
    problems.extend(f"{unknown(group, name, _names(group))}{hint}" for name in wrong)
    return not wrong


def _values(override: Override) -> list[str]:
    if override.is_delete():
        return []
    given = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return [str(value) for value in given]
