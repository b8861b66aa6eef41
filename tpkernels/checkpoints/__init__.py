"""Which shard of a tensor each rank holds: saved, loaded and moved to another layout."""
