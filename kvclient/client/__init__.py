"""The client: connect(), KVClient, and what it does about errors.

Never finds a daemon's memory by itself: the native half (kvclient._core) maps it.
"""
