"""Train an image classifier: ``python train_vision.py model=resnet50 act=polynorm``."""

from polyvision.training.app import main

if __name__ == "__main__":
    main("vision")
