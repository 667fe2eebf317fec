"""The order of samples, loader processes, batches."""
