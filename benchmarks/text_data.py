"""How fast text is prepared and read, and how long it takes to open a corpus of any size.

    python -m benchmarks.text_data
    python -m benchmarks.text_data --text folder --copies 10 --tokenizer bpe:4096 --workers 8

Preparing is timed with one process and with several: learning a tokenizer and encoding, then
encoding alone, with the tokenizer that was learned. Rates of the loader are those of one process
without a model, in the random order of training; beside them stands what a small model consumes,
which is the tokens of a whole training step by its time on all cores. The corpora that are opened
are made of links to one sparse file, which take no room on the disk: opening reads an index and a
header per shard, a first window the document borders of eight.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from polyvision.data.text.corpus import INDEX, INDEX_VERSION, TOKENIZER, Corpus
from polyvision.data.text.file import load_book
from polyvision.data.text.prepare.prepare import Settings, prepare
from polyvision.data.text.sampling import ShuffledWindows
from polyvision.data.text.shards import ShardHeader
from polyvision.data.text.sources import find_sources, read_pieces
from polyvision.data.text.tokenizers import ByteTokenizer

# Tokens and documents of each shard of the corpora that are only opened: 2 KB of text a document.
SHARD_TOKENS, SHARD_DOCUMENTS = 1 << 26, 1 << 16
BATCH = 4


def documents(text: str | None) -> Iterator[str]:
    """Yield the paragraphs of the book, or the documents of the files ``text``."""
    if text is None:
        yield from load_book().split("\n\n")
        return
    for source in find_sources([text]):
        held = ""
        for piece in read_pieces(source, text_key="text", separator=None):
            held += piece.text
            if piece.ends:
                yield held
                held = ""


def repeated(text: str | None, copies: int, folder: Path) -> str:
    """Write ``copies`` of the text as JSON lines, each copy a little different."""
    file = folder / "copies.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for copy in range(copies):
            for document in documents(text):
                out.write(json.dumps({"text": f"{copy} {document}"}) + "\n")
    return str(file)


def prepare_rates(text: str, tokenizers: list[str], workers: int, folder: Path) -> Corpus:
    """Prepare the text with each tokenizer and print MB/s; return the last corpus."""
    sources = find_sources([text])
    megabytes = sum(source.size for source in sources) / 1e6
    print(f"prepare {text}: {len(sources):,} files, {megabytes:.1f} MB")
    for tokenizer in tokenizers:
        chosen, again = tokenizer, tokenizer.startswith("bpe:")
        while True:
            for number in sorted({1, workers}):
                out = folder / f"{tokenizer.replace(':', '-').replace('/', '-')}-{again}-{number}"
                start = time.perf_counter()
                corpus = prepare(sources, out, Settings(chosen), workers=number)
                seconds = time.perf_counter() - start
                tokens = sum(part.tokens for part in corpus.parts.values())
                label = tokenizer if chosen == tokenizer else f"{tokenizer}, learned before"
                print(
                    f"  {label}, {number} processes: {seconds:.1f} s, "
                    f"{megabytes / seconds:.1f} MB/s, {tokens:,} tokens",
                    flush=True,
                )
            if not again:
                break
            chosen, again = str(corpus.folder / TOKENIZER), False
    return corpus


def loader_rate(corpus: Corpus, context: int, batch: int) -> float:
    """Return the tokens/s of the training loader."""
    from polyvision.training.loading.loader import TrainLoader

    windows = ShuffledWindows(corpus.parts["train"], context, seed=0)
    loader = TrainLoader(windows, batch, seed=0)
    for _ in loader:  # builds the order, fills the page cache
        break
    tokens, start = 0, time.perf_counter()
    while time.perf_counter() - start < 2:
        for inputs, _ in loader:
            tokens += inputs.numel()
    return tokens / (time.perf_counter() - start)


def consumed(preset: str, vocabulary: int) -> tuple[float, int]:
    """Return the tokens/s of a model's training step with PolyNorm, and its context."""
    # Here, since each process that encodes imports what stands at the top of this file.
    from benchmarks.train_lm import random_tokens, training_step
    from polyvision.training.config.compose import compose
    from polyvision.training.tasks.language import transformer_shape

    (config,) = compose("language", [f"model={preset}"])
    shape = transformer_shape(config.model, config.act, vocabulary)
    step, _ = training_step("ours, polynorm", shape, random_tokens(shape, BATCH))
    times = []
    for _ in range(9):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return BATCH * shape.context / statistics.median(times[2:]), shape.context


def loader_rates(corpus: Corpus, presets: list[str]) -> None:
    """Print tokens/s of the loader, and how often that is what small models take."""
    for preset in presets:
        wanted, context = consumed(preset, corpus.tokenizer.vocab_size)
        found = loader_rate(corpus, context, BATCH)
        print(
            f"loader, context {context}, batch {BATCH}: {found:,.0f} tokens/s; {preset} takes "
            f"{wanted:,.0f}: {found / wanted:,.0f} times (at least 20)",
            flush=True,
        )
    print(
        f"loader, context 2048, batch 8: {loader_rate(corpus, 2048, 8):,.0f} tokens/s", flush=True
    )


def large_corpus(folder: Path, shards: int) -> Path:
    """Write a corpus of linked sparse shards, all tokens zero, all documents of equal length."""
    tokenizer = ByteTokenizer()
    ends = np.linspace(0, SHARD_TOKENS, SHARD_DOCUMENTS + 1).astype("<u8").tobytes()
    header = ShardHeader(
        itemsize=1,
        vocab_size=256,
        tokens=SHARD_TOKENS,
        documents=SHARD_DOCUMENTS,
        text_bytes=SHARD_TOKENS,
        largest=0,
        tokenizer=tokenizer.fingerprint,
        checksum="00" * 32,
    )
    folder.mkdir()
    entries = []
    for number in range(shards):
        path = folder / f"train-{number:05}.bin"
        if number:
            os.link(folder / "train-00000.bin", path)
        else:
            with path.open("wb") as file:
                file.write(header.pack())
                file.seek(header.offsets_at)
                file.write(ends)
        counts = {"tokens": header.tokens, "documents": header.documents, "sha256": header.checksum}
        entries.append({"file": path.name, **counts})
    (folder / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
    described = {"sha256": tokenizer.fingerprint, "vocab_size": 256, "end": None}
    parts = {"train": {"shards": entries}}
    index = {"version": INDEX_VERSION, "tokenizer": described, "settings": {}, "parts": parts}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return folder


def start_up(folder: Path, shards: int) -> None:
    """Print how long a corpus takes to open, and to give windows from anywhere."""
    large_corpus(folder, shards)
    start = time.perf_counter()
    windows = ShuffledWindows(Corpus(folder, "folder").parts["train"], 2048, seed=0)
    opened = time.perf_counter()
    windows.sample(0, 0)
    first = time.perf_counter()
    windows.sample(0, len(windows) * 2 // 3)
    print(
        f"start-up, {shards:,} shards, {shards * SHARD_TOKENS / 1e9:,.1f} G tokens, "
        f"{shards * SHARD_DOCUMENTS / 1e6:,.1f} M documents: open {opened - start:.2f} s, first "
        f"window {first - opened:.2f} s, resumed at two thirds {time.perf_counter() - first:.2f} s",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="what to prepare (default: the built-in book, 8 copies)")
    parser.add_argument("--copies", type=int, help="of the text, as JSON lines (default: itself)")
    parser.add_argument("--tokenizer", nargs="+", default=["bytes", "bpe:4096"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=["lm_tiny", "lm_mini"])
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 100, 2000, 20000])
    arguments = parser.parse_args()
    text, copies = arguments.text, arguments.copies
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if text is None or copies is not None:
            text = repeated(text, copies or 8, folder)
        corpus = prepare_rates(text, arguments.tokenizer, arguments.workers, folder)
        loader_rates(corpus, arguments.models)
        for shards in arguments.shards:
            start_up(folder / f"{shards}-shards", shards)


if __name__ == "__main__":
    main()
