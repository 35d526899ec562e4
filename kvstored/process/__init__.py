"""The daemon as a process: runtime directory, descriptors kept over a restart, limits, reload,
word to systemd.

Never knows a block.
"""
