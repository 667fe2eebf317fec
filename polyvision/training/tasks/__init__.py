"""The two tasks: image classification and language modelling."""
