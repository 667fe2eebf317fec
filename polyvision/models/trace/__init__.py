"""What a network does with its activations: a forward pass on tensors without data, recorded."""
