"""Goal: the public fake answers as the daemon does. Method: the conformance suite over InMemoryClient, with
the integrity of its pool checked after each case.
"""

from kvclient.testing.conformance import StoreConformance
from kvclient.testing.in_memory import InMemoryClient
from kvclient.testing.in_memory_store import InMemoryStore


class TestInMemory(StoreConformance):
    def setup_method(self):
        self.store = InMemoryStore(capacity_bytes=64 << 20)
        super().setup_method()

    def teardown_method(self):
        super().teardown_method()
        self.store.check_integrity()

    def connect(self, **options):
        return InMemoryClient(store=self.store, **options)

    def test_it_has_no_host_among_peers(self):
        assert self.client.stats()["node"] == ""
