"""For the tests of programs that use kvclient: a client without a daemon, and the cases every door must pass.

Never connects to anything.
"""

from kvclient.testing.in_memory import InMemoryClient

__all__ = ["InMemoryClient"]
