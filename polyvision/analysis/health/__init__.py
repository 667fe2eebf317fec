"""Health of a network: zeros, dead neurons, extremes, sparsity."""
