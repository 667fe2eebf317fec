"""Text as tokens: tokenizers, preparation, shards, windows."""
