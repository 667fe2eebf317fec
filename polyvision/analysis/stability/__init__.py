"""The fp16 stability lab: where activations overflow, and what that does to training."""
