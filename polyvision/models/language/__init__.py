"""The transformer language model."""
