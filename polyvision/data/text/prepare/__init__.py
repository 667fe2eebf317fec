"""From text files to token shards."""
