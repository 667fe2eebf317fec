"""A trained language model in use: generated text, perplexity, benchmark tasks."""
