"""Studies of trained and untrained networks, without Lightning: numerical stability."""
