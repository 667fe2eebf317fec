"""Replace the activations of any network, with an audit of what was replaced."""
