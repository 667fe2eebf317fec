"""Train a language model: ``python train_lm.py act=polynorm``; ``--help`` lists the options."""

from polyvision.training.app import main

if __name__ == "__main__":
    main("language")
