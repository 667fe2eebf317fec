"""Cost: FLOPs, bytes kept for the backward pass, time."""
