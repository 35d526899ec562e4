"""Blocks between daemons beside a raw stream: `python -m bench.hosts`."""
