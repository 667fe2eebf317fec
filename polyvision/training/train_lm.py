"""``python -m polyvision.training.train_lm``: what ``train_lm.py`` does, without the repository."""

from __future__ import annotations

from polyvision.training.app import main

__all__: list[str] = []

if __name__ == "__main__":
    main("language")
