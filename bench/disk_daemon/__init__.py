"""The disk tier through the daemon, LMCache beside it: `python -m bench.disk_daemon`."""
