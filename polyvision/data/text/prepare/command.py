"""``polyvision prepare-text``: text files to token shards, from the command line."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from polyvision.data.text.corpus import INDEX, TOKENIZER, Corpus
from polyvision.data.text.prepare.prepare import Settings, prepare
from polyvision.data.text.sources import find_sources
from polyvision.errors import PolyvisionError
from polyvision.output import plural

__all__ = ["add_arguments", "describe", "run"]

# Below this many bytes of files a second process takes longer to start than it saves.
_SMALL = 16 << 20
# What shells return for a command that Ctrl-C ended.
_INTERRUPTED = 130
# Lines left out that the summary names.
_SHOWN = 10
_AFTER = {
    "document": "between two documents",
    "paragraph": "after a paragraph",
    "line": "after a line",
    "word": "after a word",
    "character": "where no border between words is near",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``prepare-text``."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text (.txt ...), JSON lines (.jsonl, .ndjson, .json) or .parquet, also .bz2 .gz .xz "
        ".zst; folders and quoted patterns such as 'data/**/*.jsonl.gz'",
    )
    parser.add_argument("--out", required=True, help="folder of the shards")
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="bytes, bpe:<vocabulary> (learned from the training split), a tokenizer.json, or a "
        "folder with one or with GPT-2's files",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=Settings.val_fraction,
        help="share of the documents that validates, 0 for none; of too few documents, the last "
        "part of the text (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses them (default: %(default)s)")
    parser.add_argument(
        "--separator",
        help=r"splits plain text files into documents, such as '\n\n' or '<|endoftext|>' "
        "(default: a file is a document)",
    )
    parser.add_argument(
        "--end-token",
        metavar="NAME",
        help="the special token after each document, such as '<|im_end|>' (default: the "
        "tokenizer's <|endoftext|>, <|end_of_text|>, </s> or <eos>, if it has one)",
    )
    parser.add_argument(
        "--text-key",
        default=Settings.text_key,
        help="key or column of the text in JSON lines and parquet (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=Settings.shard_tokens,
        help="a shard ends with the document that reaches this many (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that encode (default: one per core; one for small inputs and for bytes)",
    )
    parser.add_argument(
        "--skip-bad-lines",
        type=int,
        default=0,
        metavar="N",
        help="leave out up to N lines of JSON lines that cannot be used, and name them (default: "
        "the first one is an error)",
    )
    parser.add_argument(
        "--check-inputs",
        action="store_true",
        help="compare also files above 64 MiB byte by byte with those of an earlier preparation "
        "(default: by size, time of change and samples)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete the corpus that is in --out first"
    )


def run(arguments: argparse.Namespace) -> str:
    """Prepare the corpus; return what it holds."""
    sources = find_sources(arguments.inputs)
    size = sum(source.size for source in sources)
    settings = Settings(
        arguments.tokenizer,
        arguments.val_fraction,
        arguments.seed,
        arguments.shard_tokens,
        arguments.text_key,
        _unescape(arguments.separator),
        arguments.end_token,
    )
    start = time.perf_counter()
    workers = arguments.workers
    if workers is None:
        workers = _workers(size, arguments.tokenizer)
    try:
        with tqdm(total=size, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
            corpus = prepare(
                sources,
                Path(arguments.out).expanduser(),
                settings,
                workers=workers,
                overwrite=arguments.overwrite,
                skip_bad_lines=arguments.skip_bad_lines,
                check_inputs=arguments.check_inputs,
                say=lambda text: tqdm.write(text, file=sys.stderr),
                on_progress=lambda done: bar.update(done - bar.n) and None,
            )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None
    seconds = time.perf_counter() - start
    rate = f"{plural(len(sources), 'file')}, {size / 1e6:,.1f} MB, in {seconds:.1f} s"
    command = f"python train_lm.py data=shards data.path={corpus.folder}"
    return f"{describe(corpus)}\n  read       {rate}\n  train      {command}"


def describe(corpus: Corpus) -> str:
    """Return a table of a corpus."""
    vocab = corpus.tokenizer.vocab_size
    lines = [
        f"Corpus {corpus.folder}",
        f"  tokenizer  {vocab:,} tokens, {corpus.folder / TOKENIZER}",
    ]
    for name, part in corpus.parts.items():
        each = part.text_bytes / part.tokens
        lines.append(
            f"  {name:<9}  {plural(part.documents, 'document')}, {plural(part.tokens, 'token')}, "
            f"{plural(part.text_bytes, 'byte')} ({each:.2f} a token), "
            f"{plural(len(part.shards), 'shard')}"
        )
    lines.insert(2, f"  end token  {_end_token(corpus)}")
    if split := corpus.index.get("split"):
        what = split.get("file", "the only document")
        lines.append(
            f"  split      {what} is divided at character {split['character']:,}, "
            f"{_AFTER[split['border']]}: what follows validates"
        )
    if left_out := corpus.index.get("bad_lines"):
        lines.append(
            f"  left out   {plural(len(left_out), 'line')} that cannot be used, see {INDEX}:"
        )
        lines += [f"    {each['line']}: {each['reason']}" for each in left_out[:_SHOWN]]
    return "\n".join(lines)


def _end_token(corpus: Corpus) -> str:
    tokenizer = corpus.tokenizer
    if tokenizer.end is None:
        return "none: documents follow each other without a mark (see --end-token)"
    return f"{tokenizer.end_name} (id {tokenizer.end}) after each document"


def _workers(size: int, tokenizer: str) -> int:
    """Return the number that is fastest; encoding bytes costs less than handing them out."""
    if size < _SMALL or tokenizer == "bytes":
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _unescape(text: str | None) -> str | None:
    r"""Read ``\n``, ``\r``, ``\t`` and ``\\`` as a shell cannot write them easily.

    Raises:
        PolyvisionError: another escape.
    """
    if text is None:
        return None
    parts = text.split("\\\\")
    for number, part in enumerate(parts):
        for escape, character in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
            part = part.replace(escape, character)
        if "\\" in part:
            raise PolyvisionError(f"--separator {text!r}: only \\n, \\r, \\t and \\\\ are escapes")
        parts[number] = part
    return "\\".join(parts)
