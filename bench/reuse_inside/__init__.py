"""Reuse inside prompts, time and error beside plain generate(): `python -m bench.reuse_inside`."""
