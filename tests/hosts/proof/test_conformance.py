"""The conformance suite with a client whose blocks all come from a peer: written on one host, read on
another.

Both daemons live for all cases, and after each case both have as much memory in use as before.
"""

import pytest

from kvclient.testing.conformance import StoreConformance
from tests.hosts.proof.far_client import FarClient


class TestBlocksOfAPeer(StoreConformance):
    lacks = frozenset({"at_once"})

    @pytest.fixture(autouse=True)
    def _on_two_hosts(self, pair_of_hosts):
        self.hosts = pair_of_hosts
        StoreConformance.setup_method(self)
        yield
        StoreConformance.teardown_method(self)

    def setup_method(self):
        """The fixture does it."""

    def teardown_method(self):
        """The fixture does it."""

    def connect(self, **options):
        return FarClient(self.hosts[0].connect(**options), self.hosts[1].connect(**options))

    @pytest.mark.skip(reason="the reader's pins are on its host, and the writer's memory is filled")
    def test_a_pinned_block_is_not_evicted(self):
        pass

    @pytest.mark.skip(reason="the reader's pins are on its host, and the writer's memory is filled")
    def test_no_space_when_all_is_pinned(self):
        pass
