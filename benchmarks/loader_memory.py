"""What a worker process adds for a million file names: ours, and a list of Python strings.

    python -m benchmarks.loader_memory --files 1000000

A worker is forked, reads every name once in random order, and reports its private memory before and
after (Linux, /proc/self/smaps_rollup). Listing is timed on real, empty files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polyvision.data.images.folder import ClassTree, ImageFiles, scan_class_tree


def private_mib() -> float:
    """Return the memory that this process shares with no other one."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def worker(read: Callable[[int], object], count: int, report: multiprocessing.SimpleQueue) -> None:
    """Read all names and report what that added."""
    order = np.random.default_rng(0).permutation(count)
    before = private_mib()
    for index in order:
        read(int(index))
    report.put(private_mib() - before)


def growth(read: Callable[[int], object], count: int) -> float:
    """Return the MiB by which reading every name grows a forked worker."""
    context = multiprocessing.get_context("fork")
    report = context.SimpleQueue()
    process = context.Process(target=worker, args=(read, count, report))
    process.start()
    found: float = report.get()
    process.join()
    return found


def listing(count: int, classes: int) -> float:
    """Return the seconds that listing ``count`` empty files takes."""
    with tempfile.TemporaryDirectory() as folder:
        for label in range(classes):
            place = Path(folder, f"n{label:08}")
            place.mkdir()
            for number in range(count // classes):
                (place / f"n{label:08}_{number}.JPEG").touch()
        start = time.perf_counter()
        tree = scan_class_tree(Path(folder))
        assert len(tree) == count // classes * classes
        return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument(
        "--listed", type=int, default=100_000, help="files made to time the listing"
    )
    arguments = parser.parse_args()
    per_class = max(1, arguments.files // 1000)
    files = {
        f"n{label:08}": [f"n{label:08}/n{label:08}_{number}.JPEG" for number in range(per_class)]
        for label in range(1000)
    }
    count = 1000 * per_class
    start = time.perf_counter()
    images = ImageFiles(ClassTree(Path("train"), files))
    print(f"{count:,} names packed in {time.perf_counter() - start:.1f} s")
    print(f"one worker, polyvision:      +{growth(images.name, count):.1f} MiB")
    names = [name for each in files.values() for name in each]
    print(f"one worker, list of strings: +{growth(names.__getitem__, count):.1f} MiB")
    seconds = listing(arguments.listed, 1000)
    print(f"listing {arguments.listed:,} files: {seconds:.2f} s")


if __name__ == "__main__":
    main()
