"""How fast text is prepared and read, and how long it takes to open a large corpus.

    python -m benchmarks.text_data
    python -m benchmarks.text_data --text folder --tokenizer bpe:4096 --workers 8

Rates of the loader are those of one process without a model, in the random order of training. The
large corpus is made of sparse files, which take no room on the disk: what is measured is opening
it, which reads an index and a header per shard, and the first window.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from polyvision.data.corpus import INDEX, INDEX_VERSION, TOKENIZER, Corpus
from polyvision.data.prepare import Settings, prepare
from polyvision.data.sampling import ShuffledWindows
from polyvision.data.shards import HEADER_BYTES, ShardHeader
from polyvision.data.sources import find_sources
from polyvision.data.text import load_book
from polyvision.data.tokenizers import ByteTokenizer
from polyvision.training.loader import TrainLoader


def prepare_rates(text: str | None, tokenizers: list[str], workers: int, folder: Path) -> Corpus:
    """Prepare the text with each tokenizer and print MB/s; return the last corpus."""
    if text is None:
        file = folder / "book.jsonl"
        paragraphs = load_book().split("\n\n") * 8
        file.write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs))
        text = str(file)
    sources = find_sources([text])
    megabytes = sum(source.size for source in sources) / 1e6
    print(f"prepare {text}: {len(sources):,} files, {megabytes:.1f} MB")
    for tokenizer in tokenizers:
        for number in sorted({1, workers}):
            out = folder / f"{Path(tokenizer).name}-{number}".replace(":", "-")
            start = time.perf_counter()
            corpus = prepare(sources, out, Settings(tokenizer), workers=number)
            seconds = time.perf_counter() - start
            tokens = sum(part.tokens for part in corpus.parts.values())
            print(
                f"  {tokenizer}, {number} processes: {seconds:.1f} s, "
                f"{megabytes / seconds:.1f} MB/s, {tokens:,} tokens"
            )
    return corpus


def loader_rates(corpus: Corpus) -> None:
    """Print tokens/s of the training loader."""
    for context, batch in ((256, 4), (2048, 8)):
        windows = ShuffledWindows(corpus.parts["train"], context, seed=0)
        loader = TrainLoader(windows, batch, seed=0)
        for _ in loader:  # builds the order, fills the page cache
            break
        tokens, start = 0, time.perf_counter()
        while time.perf_counter() - start < 2:
            for inputs, _ in loader:
                tokens += inputs.numel()
        seconds = time.perf_counter() - start
        print(f"loader, context {context}, batch {batch}: {tokens / seconds:,.0f} tokens/s")


def large_corpus(folder: Path, shards: int, tokens: int, documents: int) -> Path:
    """Write a corpus of sparse shards, all tokens zero and all documents of equal length."""
    tokenizer = ByteTokenizer()
    ends = np.linspace(0, tokens, documents + 1).astype("<u8").tobytes()
    header = ShardHeader(
        1, 256, tokens, documents, tokens, 0, tokenizer.fingerprint, checksum="00" * 32
    )
    entries = []
    folder.mkdir()
    for number in range(shards):
        name = f"train-{number:05}.bin"
        with (folder / name).open("wb") as file:
            file.write(header.pack())
            file.seek(header.offsets_at)
            file.write(ends)
        counts = {"tokens": tokens, "documents": documents, "sha256": header.checksum}
        entries.append({"file": name, **counts})
    (folder / TOKENIZER).write_text(tokenizer.to_json())
    described = {"sha256": tokenizer.fingerprint, "vocab_size": 256, "end": None}
    parts = {"train": {"shards": entries}}
    index = {"version": INDEX_VERSION, "tokenizer": described, "settings": {}, "parts": parts}
    (folder / INDEX).write_text(json.dumps(index))
    assert HEADER_BYTES + tokens <= header.file_bytes
    return folder


def start_up(folder: Path, shards: int, tokens: int, documents: int) -> None:
    """Print how long a large corpus takes to open, and to give windows from anywhere."""
    large_corpus(folder, shards, tokens, documents)
    print(
        f"start-up, {shards:,} shards, {shards * tokens / 1e9:,.0f} G tokens, "
        f"{shards * documents / 1e6:,.0f} M documents:"
    )
    start = time.perf_counter()
    part = Corpus(folder, "folder").parts["train"]
    windows = ShuffledWindows(part, 2048, seed=0)
    opened = time.perf_counter()
    windows.sample(0, 0)
    first = time.perf_counter()
    windows.sample(0, len(windows) * 2 // 3)
    print(
        f"  open {opened - start:.2f} s, first window {first - opened:.2f} s, "
        f"window after a resume at two thirds {time.perf_counter() - first:.2f} s"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", help="what to prepare (default: the built-in book eight times)")
    parser.add_argument("--tokenizer", nargs="+", default=["bytes", "bpe:4096"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loader_rates(prepare_rates(arguments.text, arguments.tokenizer, arguments.workers, folder))
        start_up(folder / "large", arguments.shards, 1 << 26, 1 << 16)


if __name__ == "__main__":
    main()
