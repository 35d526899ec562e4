"""What stays of a model in memory: how it is read, and what stands in its place until it is there."""
