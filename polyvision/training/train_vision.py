"""``python -m polyvision.training.train_vision``: ``train_vision.py`` without the repository."""

from polyvision.training.app import main

if __name__ == "__main__":
    main("vision")
