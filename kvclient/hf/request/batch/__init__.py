"""A batch of different prompts, of which some are reused inside."""
