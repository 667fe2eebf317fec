"""Data: images, text and tokenizers."""
