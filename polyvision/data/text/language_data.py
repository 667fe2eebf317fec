"""The data of a language model: training windows, validation sets by name, and their tokenizer.

It comes from a text that is prepared on the fly (``book``, ``text``) or from prepared shards.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from polyvision.data.text.corpus import Corpus, Part
from polyvision.data.text.file import TokenWindows, load_text_data
from polyvision.data.text.sampling import MixedWindows, PartWindows, ShuffledWindows
from polyvision.data.text.tokenizers import Tokenizer
from polyvision.errors import PolyvisionError, unknown
from polyvision.output import plural

__all__ = ["LanguageData", "load_language_data"]

TrainWindows = TokenWindows | ShuffledWindows | MixedWindows
ValWindows = TokenWindows | PartWindows
_NAMES = ("book", "text", "shards")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LanguageData:
    """What a language model is trained and validated on.

    Attributes:
        train: windows for training.
        val: windows of the main validation set.
        named: further validation sets.
        tokenizer: of all of them.
        plan: labelled lines for the plan of a run.
    """

    train: TrainWindows
    val: ValWindows
    named: dict[str, ValWindows]
    tokenizer: Tokenizer
    plan: dict[str, str]


def load_language_data(
    name: str,
    *,
    context: int,
    seed: int = 0,
    path: str | None = None,
    tokenizer: str | None = None,
    val_fraction: float | None = None,
    mix: Mapping[str, float] | None = None,
    val: Mapping[str, str] | None = None,
) -> LanguageData:
    """Load ``book``, the file ``text`` or prepared ``shards``, and the named validation sets.

    Args:
        name: one of these three.
        context: tokens per window.
        seed: of the order of shards.
        path: the file, or the folder of the shards.
        tokenizer: of ``book`` and ``text``; shards have theirs.
        val_fraction: of ``book`` and ``text``; shards are split.
        mix: weights of several corpora, the folders of this name in ``path``.
        val: prepared folders of further validation sets, by name. Their validation split is taken,
            or everything where there is none.

    Raises:
        PolyvisionError: a value does not fit, a corpus cannot be read, tokenizers differ, or a part
            is shorter than one window.
    """
    if name not in _NAMES:
        raise unknown("text data", name, _NAMES)
    named = {key: _named(key, folder) for key, folder in (val or {}).items()}
    if name == "shards":
        _refuse(
            name, {"tokenizer": tokenizer, "val_fraction": val_fraction}, "prepare-text sets it"
        )
        corpora = _corpora(path, mix or {})
        _refuse_doubles(corpora, named)
        return _from_shards(corpora, mix or {}, named, context, seed)
    _refuse(name, {"mix": mix or None}, "it takes data=shards")
    return _from_text(name, context, path, tokenizer, val_fraction, named)


def _refuse(name: str, given: Mapping[str, object], why: str) -> None:
    for key, value in given.items():
        if value is not None:
            raise PolyvisionError(f"data={name} takes no data.{key} ({why}), got {value!r}")


def _refuse_doubles(corpora: Mapping[str, Corpus], named: Mapping[str, Corpus]) -> None:
    for key in corpora:
        if key in named and "val" in corpora[key].parts:
            raise PolyvisionError(
                f"data.val.{key} has the name of data.mix.{key}, whose validation split is "
                f"measured too: choose another name"
            )


def _from_text(
    name: str,
    context: int,
    path: str | None,
    tokenizer: str | None,
    val_fraction: float | None,
    named: Mapping[str, Corpus],
) -> LanguageData:
    if tokenizer is None or val_fraction is None:
        raise PolyvisionError(f"data={name} needs data.tokenizer and data.val_fraction")
    text = load_text_data(
        name, context=context, tokenizer=tokenizer, path=path, val_fraction=val_fraction
    )
    sets = _named_windows(named, text.tokenizer, context)
    return LanguageData(text.train, text.val, sets, text.tokenizer, text.describe() | _lines(named))


def _corpora(path: str | None, mix: Mapping[str, float]) -> dict[str, Corpus]:
    if not mix:
        if path is None:
            raise PolyvisionError(
                "data=shards needs a folder that polyvision prepare-text wrote: data.path=<folder>"
            )
        return {"": Corpus(path, "data.path")}
    root = Path(path or ".").expanduser()
    return {key: Corpus(root / key, f"data.mix.{key}") for key in mix}


def _from_shards(
    corpora: Mapping[str, Corpus],
    mix: Mapping[str, float],
    named: Mapping[str, Corpus],
    context: int,
    seed: int,
) -> LanguageData:
    first, *others = corpora.values()
    for other in others:
        _same_tokenizer(first.tokenizer, other, f"{first.folder}")
    windows = [
        ShuffledWindows(_part(corpus, "train", context), context, seed)
        for corpus in corpora.values()
    ]
    train = MixedWindows(windows, list(mix.values()), seed) if mix else windows[0]
    sets: dict[str, ValWindows] = {
        key: PartWindows(_part(corpus, "val", context), context)
        for key, corpus in corpora.items()
        if "val" in corpus.parts
    }
    plan = _plan(corpora, train)
    sets |= _named_windows(named, first.tokenizer, context)
    if not sets:
        raise PolyvisionError(
            f"{first.folder} has no validation split: prepare it with --val-fraction, or name a "
            "set with data.val.<name>=<folder>"
        )
    main, *rest = sets
    if main:
        plan["val"] = f"main set (val/loss): {main}"
    return LanguageData(
        train,
        sets[main],
        {key: sets[key] for key in rest},
        first.tokenizer,
        plan | _lines(named, corpora.values()),
    )


def _plan(corpora: Mapping[str, Corpus], train: TrainWindows) -> dict[str, str]:
    first = next(iter(corpora.values()))
    plan = {"tokenizer": f"{first.tokenizer.vocab_size:,} tokens"}
    shares = train.counts / train.counts.sum() if isinstance(train, MixedWindows) else [None]
    for (key, corpus), share in zip(corpora.items(), shares, strict=True):
        label = f"data {key}".strip()
        text = f"{corpus.folder}, {_describe(corpus.parts['train'])}"
        plan[label] = text if share is None else f"{100 * share:g} % of {text}"
        if "val" in corpus.parts:
            plan[f"val {key}".strip()] = _describe(corpus.parts["val"])
    plan["train"] = f"{len(train):,} windows of {train.context:,} an epoch"
    return plan


def _lines(named: Mapping[str, Corpus], trained_on: Iterable[Corpus] = ()) -> dict[str, str]:
    """Describe the named sets, and say and warn where one is validated on its training split."""
    checksums = {c for corpus in trained_on for c in _checksums(corpus.parts["train"])}
    lines = {}
    for key, corpus in named.items():
        lines[f"val {key}"] = f"{corpus.folder}, {_describe(_val_part(corpus))}"
        if "val" in corpus.parts:
            continue
        what = "it has no validation split, so all of its training split is taken"
        lines[f"val {key}"] += f"; {what}"
        if checksums & _checksums(corpus.parts["train"]):
            what += ", which this run also trains on: val/{key} shows no generalisation"
        _log.warning("data.val.%s=%s: %s", key, corpus.folder, what.format(key=key))
    return lines


def _checksums(part: Part) -> set[str]:
    return {shard.header.checksum for shard in part.shards}


def _describe(part: Part) -> str:
    sizes = (part.documents, "document"), (part.tokens, "token"), (part.text_bytes, "byte")
    return ", ".join(plural(*size) for size in sizes)


def _named(key: str, folder: str) -> Corpus:
    if not re.fullmatch(r"[\w.-]+", key):
        raise PolyvisionError(
            f"data.val.{key}: a name has letters, digits, '_', '.' and '-', since it names metrics"
        )
    return Corpus(folder, f"data.val.{key}")


def _val_part(corpus: Corpus) -> Part:
    return corpus.parts.get("val") or corpus.parts["train"]


def _named_windows(
    named: Mapping[str, Corpus], tokenizer: Tokenizer, context: int
) -> dict[str, ValWindows]:
    sets: dict[str, ValWindows] = {}
    for key, corpus in named.items():
        _same_tokenizer(tokenizer, corpus, "the training data")
        part = _val_part(corpus)
        _long_enough(part, f"data.val.{key}={corpus.folder}", context)
        sets[key] = PartWindows(part, context)
    return sets


def _same_tokenizer(tokenizer: Tokenizer, other: Corpus, whose: str) -> None:
    mine, theirs = tokenizer.fingerprint, other.tokenizer.fingerprint
    if mine != theirs:
        raise PolyvisionError(
            f"{other.folder} was prepared with another tokenizer ({theirs[:12]}, "
            f"{other.tokenizer.vocab_size:,} tokens) than {whose} ({mine[:12]}, "
            f"{tokenizer.vocab_size:,} tokens): prepare it with --tokenizer and the tokenizer.json "
            "of the training data"
        )


def _part(corpus: Corpus, name: str, context: int) -> Part:
    part = corpus.parts[name]
    _long_enough(part, f"the part {name!r} of {corpus.folder}", context)
    return part


def _long_enough(part: Part, what: str, context: int) -> None:
    if part.tokens <= context:
        raise PolyvisionError(
            f"{what} has {part.tokens:,} tokens, one window needs {context + 1:,} (the context and "
            "one more): use more text or a smaller context"
        )
