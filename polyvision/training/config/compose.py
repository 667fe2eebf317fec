"""From the command line to a typed configuration, with every problem reported in one error.

Hydra composes the groups in ``configs/``; the group ``act`` comes from the activation registry.
Hydra itself stops at the first mistake and knows no types: values are checked here, and where
something is wrong, each override is compared with the groups and keys that there are.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from polyvision.activations import activation_info, activation_names, create_activation
from polyvision.activations.plugins import load_plugins, plugins_of
from polyvision.activations.registry import own_activation
from polyvision.errors import PolyvisionError, some, unknown
from polyvision.training.config import schema
from polyvision.training.config.recipe_options import check_schedule_options
from polyvision.training.config.typed import load, with_defaults

__all__ = [
    "CONFIG_MODULE",
    "SCRIPTS",
    "check_keys",
    "combinations",
    "completed",
    "compose",
    "config_from_plain",
    "open_keys",
    "register_groups",
    "typed_config",
]

CONFIG_MODULE = "polyvision.configs"
SCRIPTS = {"vision": "train_vision", "language": "train_lm"}
Task = Literal["vision", "language"]
T = TypeVar("T")

# Groups whose keys are names that the user chooses, or options that their readers check.
_OPEN = re.compile(r"data\.(val|mix)[.=]|(model|data|recipe)\.(\w+_)?options\.\w+=|act\.init\.")
# A formula has parentheses and commas, which Hydra reads as its own unless they are in quotes.
_FORMULA = re.compile(r"(act\.f=)(?!['\"])(.+)", re.DOTALL)

_SCHEMAS: dict[str, dict[str, type[Any]]] = {
    "vision": {
        "model": schema.VisionModelConfig,
        "data": schema.ImageDataConfig,
        "recipe": schema.VisionRecipeConfig,
        "trainer": schema.TrainerConfig,
        "analysis": schema.AnalysisConfig,
    },
    "language": {
        "model": schema.LanguageModelConfig,
        "data": schema.TextDataConfig,
        "recipe": schema.LanguageRecipeConfig,
        "trainer": schema.TrainerConfig,
        "analysis": schema.AnalysisConfig,
    },
}


def register_groups() -> None:
    """Offer every registered activation as ``act=<name>``, its options as ``act.<option>=``."""
    store = ConfigStore.instance()
    for name in activation_names():
        options = dataclasses.asdict(activation_info(name).options())
        store.store(group="act", name=name, node={"name": name, **options})


def compose(task: Task, overrides: list[str]) -> list[schema.Config]:
    """Compose and check one configuration for each combination that ``overrides`` ask for.

    Args:
        task: ``vision`` or ``language``.
        overrides: Hydra overrides, ``key=value``; ``key=a,b`` makes one run for each value.

    Raises:
        ValueError: one text with a line for each problem of any of the combinations.
    """
    load_plugins(plugins_of(overrides))
    return _inside_hydra(lambda: _compose_all(task, overrides))


def check_keys(task: Task, overrides: list[str]) -> None:
    """Check what ``compose`` does except the values, which may still be missing.

    Raises:
        ValueError: one text with a line for each key or choice that does not exist.
    """
    load_plugins(plugins_of(overrides))
    _inside_hydra(lambda: _compose_all(task, overrides, values=False))


def _inside_hydra(work: Callable[[], T]) -> T:
    register_groups()
    # hydra.main may be running in this process: its state must not change under its feet.
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            return work()
    finally:
        if state is not None:
            GlobalHydra.instance().initialize(state)


def combinations(overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each run that ``key=a,b`` asks for.

    Raises:
        ValueError: an override that cannot be read.
    """
    problems: list[str] = []
    parsed = _parse(overrides, problems)
    if problems:
        raise _error(problems)
    return [list(choice) for choice in itertools.product(*map(_choices, parsed))]


def _compose_all(task: Task, overrides: list[str], *, values: bool = True) -> list[schema.Config]:
    problems: list[str] = []
    groups = _groups(tuple(activation_names()))
    parsed = _parse(overrides, problems)
    good = [o for o in parsed if _group_fits(o, groups, problems)]
    if not problems:
        configs = _each(task, good, problems, values=values)
        if not problems:
            return configs
        problems.clear()
    # Hydra stops at its first mistake. To name all of them, keys are compared with what the choices
    # of groups alone give, and the rest is composed again without the keys that do not fit.
    base = _hydra(task, [_plain_choice(o) for o in good if o.key_or_group in groups], problems)
    if base is None:
        raise _error(problems)
    good = [o for o in good if o.key_or_group in groups or _key_fits(o, base, groups, problems)]
    _each(task, good, problems, values=values)
    raise _error(problems)


def _each(
    task: Task, overrides: list[Override], problems: list[str], *, values: bool
) -> list[schema.Config]:
    """Return the configuration of each combination that fits; the rest adds to ``problems``."""
    configs = []
    for combination in itertools.product(*map(_choices, overrides)):
        node = _hydra(task, list(combination), problems)
        if node is not None and values:
            try:
                configs.append(typed_config(node))
            except PolyvisionError as error:
                problems.extend(str(error).splitlines())
    return configs


def typed_config(composed: DictConfig) -> schema.Config:
    """Turn a composed configuration into its typed form.

    Raises:
        ValueError: one text with a line for each value that does not fit.
    """
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise PolyvisionError(f"{error.full_key}: cannot resolve ${{...}}: {text}") from error
    return _typed(values)


def config_from_plain(values: Mapping[str, Any]) -> schema.Config:
    """Turn the content of a run's config.yaml, which is ``Config.plain()``, into its typed form.

    Raises:
        ValueError: one text with a line for each value that does not fit.
    """
    values = completed(values)
    act = values["act"]
    return _typed({**values, "act": {"name": act["name"], **act["options"]}})


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add to the content of a run's config.yaml the keys that its version did not have.

    One rule: a key that is added to ``schema`` has a default there, and the default means what runs
    did before. Only a config.yaml may leave it out; the files in ``configs/`` are whole.
    """
    act = values["act"]
    options = with_defaults(activation_info(str(act["name"])).options, act["options"])
    complete = {**with_defaults(_Scalars, values), "act": {"name": act["name"], "options": options}}
    for group, cls in _SCHEMAS.get(values.get("task", ""), {}).items():
        complete[group] = with_defaults(cls, values.get(group, {}))
    return complete


def _typed(values: Mapping[str, Any]) -> schema.Config:
    problems: list[str] = []
    task = values.get("task")
    if task not in _SCHEMAS:
        raise unknown("task", str(task), _SCHEMAS)
    missing = [g for g in (*_SCHEMAS[task], "act") if not isinstance(values.get(g), Mapping)]
    if missing:
        raise _error(f"{g} is missing: choose {g}=<name>" for g in missing)
    experiment = values.get("experiment")
    if isinstance(experiment, Mapping) and experiment.get("task", task) != task:
        raise _error([_wrong_task(task, "experiment", experiment)])  # so are the groups it chose
    parts: dict[str, Any] = {}
    for group, cls in _SCHEMAS[task].items():
        node = values[group]
        if node.get("task", task) != task:
            problems.append(_wrong_task(task, group, node))
        else:
            parts[group] = load(cls, node, group, problems)
    if parts.get("recipe") is not None:
        try:
            check_schedule_options(parts["recipe"])
        except PolyvisionError as error:
            problems.append(str(error))
    parts["act"] = _activation(task, values["act"], problems)
    rest = {k: v for k, v in values.items() if k not in {*_SCHEMAS[task], "act"}}
    if "precision" in rest:
        rest["precision"] = str(rest["precision"])
    scalars: Any = load(_Scalars, rest, "", problems)
    if problems:
        raise _error(problems)
    return schema.Config(**parts, **vars(scalars))


_Scalars = dataclasses.make_dataclass(
    "_Scalars",
    [
        (
            f.name,
            schema.Config.__annotations__[f.name],
            dataclasses.field(default=f.default, default_factory=f.default_factory),
        )
        for f in dataclasses.fields(schema.Config)
        if f.name not in {*_SCHEMAS["vision"], "act"}
    ],
    frozen=True,
    namespace={"__module__": schema.__name__},
)


def _activation(
    task: Task, node: Mapping[str, Any], problems: list[str]
) -> schema.ActivationConfig | None:
    info = activation_info(str(node.get("name")))
    needs = {
        "gated": "is gated: it takes two inputs",
        "mixture": "is a mixture: it takes the token too",
    }
    if task == "vision" and info.kind in needs:
        valid = ", ".join(n for n in activation_names() if activation_info(n).kind not in needs)
        problems.append(
            f"act={info.name} {needs[info.kind]} and fits only the feed-forward network "
            f"of a language model. Choose act= one of: {valid}"
        )
    options = load(info.options, {k: v for k, v in node.items() if k != "name"}, "act", problems)
    if options is None:
        return None
    values = dataclasses.asdict(options)
    try:
        create_activation(info.name, **values)
    except ValueError as error:
        problems.append(f"act={info.name}: {error}")
    return schema.ActivationConfig(info.name, values)


def _wrong_task(task: Task, group: str, node: Mapping[str, Any]) -> str:
    other, choice = node["task"], node["name"]
    choices = _groups(tuple(activation_names()))[group]
    valid = [c for c in choices if _task_of(group, c) in (None, task)]
    return (
        f"{group}={choice} is for {other}, not for {task}: run `python {SCRIPTS[other]}.py "
        f"{group}={choice}`, or choose {group}= one of: {', '.join(valid)}"
    )


@lru_cache
def _task_of(group: str, choice: str) -> str | None:
    composed = hydra_compose(SCRIPTS["vision"], overrides=[f"{group}={choice}"])
    task = OmegaConf.select(composed, f"{group}.task")
    return None if task is None else str(task)


def _error(problems: Iterable[str]) -> PolyvisionError:
    return PolyvisionError("\n".join(dict.fromkeys(problems)))


def open_keys(overrides: list[str]) -> list[str]:
    """Write overrides as Hydra wants them: keys of open groups with ``++``, a formula in quotes."""
    quoted = [_FORMULA.sub(_in_quotes, text) for text in overrides]
    return [f"++{text}" if _OPEN.match(text) else text for text in quoted]


def _in_quotes(formula: re.Match[str]) -> str:
    text = formula[2].replace("\\", "\\\\").replace('"', '\\"')
    return f'{formula[1]}"{text}"'


def _parse(overrides: list[str], problems: list[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text, opened in zip(overrides, open_keys(overrides), strict=True):
        try:
            parsed.extend(parser.parse_overrides([opened]))
        except HydraException:
            problems.append(f"cannot read {text!r}: {_advice(text)}")
    return parsed


def _advice(text: str) -> str:
    key, equals, value = text.partition("=")
    if equals and re.fullmatch(r"[+~]*\w[\w./@]*", key, re.ASCII) and not set("'\"") & set(value):
        quoted = f'{key}="{value}"'
        return f"Hydra wants quotes around such a value, in the shell {shlex.quote(quoted)}"
    return "write key=value, such as seed=1"


@lru_cache(maxsize=1)
def _groups(activations: tuple[str, ...]) -> dict[str, list[str]]:
    """Map each configuration group to its choices; those of ``act`` are the registered names."""
    loader = GlobalHydra.instance().config_loader()
    names = [g for g in loader.list_groups("") if g != "hydra"]
    return {g: sorted(loader.get_group_options(g)) for g in names}


def _group_fits(override: Override, groups: dict[str, list[str]], problems: list[str]) -> bool:
    choices = groups.get(override.key_or_group)
    if choices is None or override.is_delete():
        return True
    wrong = [str(v) for v in _values(override) if str(v) not in choices]
    hint = own_activation() if override.key_or_group == "act" else ""
    problems.extend(f"{unknown(override.key_or_group, w, choices)}{hint}" for w in wrong)
    return not wrong


def _key_fits(
    override: Override, base: DictConfig, groups: dict[str, list[str]], problems: list[str]
) -> bool:
    key = override.key_or_group
    if key.startswith("hydra") or override.is_add() or override.is_force_add():
        return True
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(base, parent) if parent else base
    if isinstance(node, DictConfig) and leaf in list(node.keys()):  # `in` denies missing values
        return True
    while parent and not OmegaConf.select(base, parent):  # name the first part that is wrong
        key, parent = parent, parent.rpartition(".")[0]
    node = OmegaConf.select(base, parent) if parent else base
    if not isinstance(node, DictConfig):
        problems.append(f"{key}: {parent} is not a group of keys but {node!r}")
        return False
    prefix = f"{parent}." if parent else ""
    valid = {f"{prefix}{k!s}" for k in node} | (set() if parent else set(groups))
    elsewhere = [] if parent else [f"{g}.{key}" for g in groups if _has(base, g, key)]
    if elsewhere:  # lr=0.1
        problems.append(f"unknown key {key!r}. Did you mean {some(elsewhere)}?")
    elif key.startswith("act.") and valid == {"act.name"}:
        problems.append(f"{key}: act={base.act.name} has no options")
    elif key in valid:  # such as experiment.name, where no experiment is chosen
        problems.append(f"{override.key_or_group}: {key} is {OmegaConf.select(base, key)!r} here")
    else:
        problems.append(str(unknown("key", key, valid)))
    return False


def _has(base: DictConfig, group: str, key: str) -> bool:
    node = OmegaConf.select(base, group)
    return isinstance(node, DictConfig) and key in list(node.keys())


def _values(override: Override) -> list[Any]:
    if override.is_sweep_override():
        return list(override.sweep_iterator())
    return [override.value()]


def _choices(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{_prefix(override)}={v}" for v in override.sweep_string_iterator()]


def _plain_choice(override: Override) -> str:
    return _choices(override)[0]


def _prefix(override: Override) -> str:
    return str(override.input_line).partition("=")[0]


def _hydra(task: Task, overrides: list[str], problems: list[str]) -> DictConfig | None:
    try:
        return hydra_compose(SCRIPTS[task], overrides=overrides)
    except HydraException as error:
        problems.append(" ".join(str(error).split()))
        return None
