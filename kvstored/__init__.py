"""kvstored: a daemon that owns the KV cache of large language models on a host.

Its native half is kvstored._core (the store and the session server); the rest of the package composes,
configures and shows it. Never imports torch, numpy or kvclient.
"""

__version__ = "0.1.0"
