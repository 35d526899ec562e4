"""Goal: whatever clients do, in whatever order, over deaths of sessions and restarts of the daemon, the
store does what a dictionary would, plus eviction that is counted; its tables agree with each other and no
byte under a pin moves.

Method: a Hypothesis state machine drives real clients against the native store and its session server in
this process, beside a model: a dict of sealed blocks, a dict of blocks being written, a list of what
readers hold. After every step the model, the statistics, check_integrity() and every byte anybody may still
read are compared.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvclient import Layout
from kvclient.errors import BlockLost, KVClientError, Unavailable
from kvclient.testing.conformance.case import wait_until
from tests.property.in_process import InProcessDaemon

LAYOUT = Layout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float16", block_tokens=32)
BLOCK_BYTES = LAYOUT.block_bytes()
KEYS = [bytes([number]) * 32 for number in range(24)]
CAPACITY = 16 * BLOCK_BYTES  # fewer than the keys: creates must evict
CLIENTS = 3
MISSING, PENDING, RESIDENT = 0, 1, 2


def content(version: int) -> bytes:
    length = LAYOUT.geometry.layers_length(LAYOUT.block_tokens)
    return (version.to_bytes(4, "little") * (length // 4))[:length]


@dataclass(eq=False)
class Writing:
    """A writer and the version of each block it was granted. Dead when its session is over."""

    client: int
    writer: Any
    versions: dict[int, int] = field(default_factory=dict)  # index in the batch -> version, while open
    keys: list[bytes] = field(default_factory=list)
    dead: bool = False


@dataclass(eq=False)
class Holding:
    """What one get returned: `pins` many pins, until blocks and views are gone."""

    blocks: Any
    expected: dict[int, int]  # index -> version
    views: dict[int, memoryview] = field(default_factory=dict)
    followed: dict[int, tuple[Writing, int]] = field(default_factory=dict)  # index -> who writes it, where

    def pins(self) -> int:
        return len(self.expected) if self.blocks is not None else len(self.views)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.daemon = InProcessDaemon(CAPACITY, max_blocks=64)
        self.clients: list[Any] = [self.daemon.connect() for _ in range(CLIENTS)]
        self.layout = self.clients[0].register_layout(LAYOUT)
        self.version = 0
        self.sealed: dict[bytes, int] = {}
        self.writing: dict[bytes, Writing] = {}
        self.writers: list[Writing] = []
        self.holdings: list[Holding] = []
        self.restarts = 0

    def teardown(self) -> None:
        try:
            self.everything_ends()
        finally:
            for client in self.clients:
                client.close()
            self.daemon.remove()

    def everything_ends(self) -> None:
        """Invariant 5: when nobody writes, holds or keeps anything, not a byte is in use."""
        for writing in self.writers:
            try:
                writing.writer.abort()
            except (Unavailable, BlockLost):
                assert writing.dead
            del writing  # it would keep its session's memory mapped
        self.writers.clear()
        for holding in self.holdings:
            holding.views.clear()
            if holding.blocks is not None:
                holding.blocks.release()
            del holding
        self.holdings.clear()
        for client in self.clients:
            client.close()
        gc.collect()
        self.daemon.store.flush()
        wait_until(lambda: self.daemon.store.stats()["used_bytes"] == 0, "not a byte is in use")
        self.daemon.store.check_integrity()

    # ---------------------------------------------------------------- rules

    clients_drawn = st.integers(0, CLIENTS - 1)
    # What a rule draws must not depend on what the store answered (whether a zombie is free yet is a matter
    # of time, and Hypothesis replays): rules draw numbers and pick with them.
    picks = st.integers(0, 1 << 16)
    keys_drawn = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5)

    def seal_all(self, writing: Writing) -> None:
        for index, version in writing.versions.items():
            self.sealed[writing.keys[index]] = version
            del self.writing[writing.keys[index]]
        self.writers.remove(writing)

    @rule(
        client=clients_drawn, keys=keys_drawn, priority=st.sampled_from([0, 35, 100]), sealing=st.booleans()
    )
    def create(self, client: int, keys: list[bytes], priority: int, sealing: bool) -> None:
        evictions = self.daemon.store.stats()["evictions"]
        nothing_held = not self.writing and not any(holding.pins() for holding in self.holdings)
        dead_writers = any(writing.dead for writing in self.writers)
        earlier = [w for w in self.writers if sealing and w.client == client and not w.dead]
        writer = self.clients[client].create(
            keys, self.layout, priority=priority, sealing=earlier[0].writer if earlier else None
        )
        if earlier:
            self.seal_all(earlier[0])
        writing = Writing(client, writer, keys=keys)
        for index, (key, result) in enumerate(zip(keys, writer.results, strict=True)):
            if result == "granted":
                assert key not in self.writing and index in writer.granted
                self.version += 1
                writing.versions[index] = self.version
                self.writing[key] = writing
                writer[index].view[:] = content(self.version)
            elif result == "exists":
                assert key in self.sealed
            elif result == "pending":
                assert key in self.writing
            else:
                assert result == "no_space" and key not in self.writing
                assert not nothing_held or dead_writers, "refused although nothing is pinned or being written"
        self.writers.append(writing)
        self.take_evictions(evictions)

    def take_evictions(self, evictions_before: int) -> None:
        """What vanished was unpinned, and was counted."""
        names = list(self.sealed)
        states = self.daemon.store.lookup(b"".join(names))
        gone = [key for key, state in zip(names, states, strict=True) if state != RESIDENT]
        for key in gone:
            version = self.sealed.pop(key)
            assert not any(
                version in holding.expected.values() and holding.pins() for holding in self.holdings
            )
        assert self.daemon.store.stats()["evictions"] - evictions_before == len(gone)

    def chosen(self, pick: int, single: bool) -> tuple[Writing | None, list[int]]:
        """A writer and its open blocks, or one of them."""
        if not self.writers:
            return None, []
        writing = self.writers[pick % len(self.writers)]
        indices = list(writing.versions)
        return writing, [indices[pick // 7 % len(indices)]] if single and indices else indices

    @rule(pick=picks, single=st.booleans())
    def seal(self, pick: int, single: bool) -> None:
        writing, indices = self.chosen(pick, single)
        if writing is None:
            return
        if writing.dead:
            self.try_dead(writing)
            return
        for index in indices:
            writing.writer.seal(index)
            key = writing.keys[index]
            self.sealed[key] = writing.versions.pop(index)
            del self.writing[key]
        if not writing.versions:
            self.writers.remove(writing)

    def try_dead(self, writing: Writing) -> None:
        """A writer whose session is over goes on writing, and tries to seal: nothing of it may be seen."""
        if writing.versions:
            for index in writing.versions:
                with pytest.raises(KVClientError):
                    writing.writer.seal(index)
        self.writers.remove(writing)

    @rule(pick=picks, single=st.booleans())
    def abort(self, pick: int, single: bool) -> None:
        writing, indices = self.chosen(pick, single)
        if writing is None:
            return
        if writing.dead:
            self.try_dead(writing)
            return
        for index in indices:
            writing.writer.abort(index)
            del writing.versions[index]
            del self.writing[writing.keys[index]]
        if not writing.versions:
            self.writers.remove(writing)

    @rule(client=clients_drawn, keys=keys_drawn, take_views=st.booleans(), follow=st.booleans())
    def get(self, client: int, keys: list[bytes], take_views: bool, follow: bool) -> None:
        blocks = self.clients[client].get(keys, follow=follow)
        holding = Holding(blocks, {})
        for index, key in enumerate(keys):
            if key in self.sealed:
                assert blocks[index] is not None and blocks[index].sealed
                holding.expected[index] = self.sealed[key]
                if take_views:
                    holding.views[index] = blocks[index].view
            elif follow and key in self.writing:
                writing = self.writing[key]
                at = next(i for i in writing.versions if writing.keys[i] == key)
                assert blocks[index] is not None and not blocks[index].sealed
                holding.expected[index] = writing.versions[at]
                holding.followed[index] = (writing, at)
            else:
                assert blocks[index] is None
        assert blocks.hits == len(holding.expected)
        if holding.expected:
            self.holdings.append(holding)

    @rule(pick=picks, keep_views=st.booleans())
    def release(self, pick: int, keep_views: bool) -> None:
        if not self.holdings:
            return
        holding = self.holdings[pick % len(self.holdings)]
        if not keep_views:
            holding.views.clear()
        if holding.blocks is not None:
            holding.blocks.release()
            holding.blocks = None
            holding.followed.clear()
        if not holding.views:
            self.holdings.remove(holding)
        gc.collect()

    @rule(client=clients_drawn, keys=keys_drawn)
    def delete(self, client: int, keys: list[bytes]) -> None:
        there = set(keys) & set(self.sealed)
        assert self.clients[client].delete(keys) == len(there)
        for key in there:
            del self.sealed[key]

    @rule(client=clients_drawn, keys=keys_drawn)
    def look_up(self, client: int, keys: list[bytes]) -> None:
        expected = [
            RESIDENT if key in self.sealed else PENDING if key in self.writing else MISSING for key in keys
        ]
        found = self.clients[client].lookup(keys)
        assert list(found.states) == expected
        assert found.resident == next(
            (i for i, state in enumerate(expected) if state != RESIDENT), len(expected)
        )

    @rule(client=clients_drawn, keys=keys_drawn)
    def touch(self, client: int, keys: list[bytes]) -> None:
        assert self.clients[client].touch(keys) == sum(key in self.sealed for key in keys)

    @rule(client=clients_drawn)
    def session_ends(self, client: int) -> None:
        self.clients[client].close()
        for writing in self.writers:
            if writing.client == client and not writing.dead:
                self.loses(writing)
        self.clients[client] = self.daemon.connect()

    def loses(self, writing: Writing) -> None:
        writing.dead = True
        for index in writing.versions:
            del self.writing[writing.keys[index]]

    @precondition(lambda self: self.restarts < 3)
    @rule()
    def daemon_restarts(self) -> None:
        self.restarts += 1
        self.daemon.restart()
        for writing in self.writers:
            if not writing.dead:
                self.loses(writing)

    @rule()
    def dead_writers_go_on_writing(self) -> None:
        for writing in self.writers:
            for index in writing.versions if writing.dead else ():
                try:
                    view = writing.writer[index].view
                except KVClientError:
                    continue
                view[:] = b"\xee" * len(view)

    # ---------------------------------------------------------------- after every step

    @invariant()
    def tables_agree(self) -> None:
        self.daemon.store.check_integrity()

    @invariant()
    def figures_agree(self) -> None:
        stats = self.daemon.store.stats()
        assert stats["blocks"] == len(self.sealed)
        assert stats["created"] == len(self.writing)
        records = sum(stats[name] for name in ("blocks", "created", "zombies", "quarantined"))
        assert stats["used_bytes"] == records * BLOCK_BYTES <= CAPACITY
        assert stats["pins"] == sum(holding.pins() for holding in self.holdings)

    @invariant()
    def every_sealed_block_has_its_bytes(self) -> None:
        for key, version in self.sealed.items():
            assert self.daemon.store.read(key) == content(version)

    @invariant()
    def nothing_moves_under_a_pin(self) -> None:
        for holding in self.holdings:
            for index, view in holding.views.items():
                assert view == content(holding.expected[index])

    @invariant()
    def followers_see_the_block_or_an_error(self) -> None:
        for holding in self.holdings:
            for index, (writing, at) in list(holding.followed.items()):
                if at in writing.versions and not writing.dead:
                    continue
                block = holding.blocks[index]
                if block.sealed:
                    assert block.view == content(holding.expected[index])
                else:
                    with pytest.raises(BlockLost):
                        block.wait_layer(0, timeout_s=20.0)
                del holding.followed[index]


def few(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


class TestStore(StoreMachine.TestCase):
    settings = few(examples=30, steps=40)


@pytest.mark.slow
class TestStoreAtLength(StoreMachine.TestCase):
    settings = few(examples=1500, steps=80)
