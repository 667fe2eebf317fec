"""``python -m polyvision.training.train_lm``: what ``train_lm.py`` does, without the repository."""

from polyvision.training.app import main

if __name__ == "__main__":
    main("language")
