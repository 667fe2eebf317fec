"""Speed and memory of the activations beside their peers: ``python -m benchmarks.<name>``."""
