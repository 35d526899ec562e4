"""Goal: the conformance suite fails when a claim is false. Method: the in-memory store with one rule taken
out at a time; the case that proves the rule must fail there, and pass with the rule in place
(test_in_memory.py).
"""

import gc

import pytest

from kvclient.errors import InvalidArgument, KVClientError
from kvclient.testing.conformance import StoreConformance, case
from kvclient.testing.in_memory import InMemoryClient, Writer
from kvclient.testing.in_memory_blocks import Blocks
from kvclient.testing.in_memory_store import CREATED, SEALED, InMemoryStore


class PinsDoNotHold(InMemoryStore):
    def settle(self):
        for record in list(self._zombies):
            self._zombies.discard(record)
            self._release(record.offset, record.length)
        while self._dropped:
            record, session = self._dropped.popleft()
            record.pins, session.pins = record.pins - 1, session.pins - 1


class PinsAreNotCounted(InMemoryStore):
    def pin(self, key, session, follow):
        pin = super().pin(key, session, follow)
        if not isinstance(pin, str):
            pin.record.pins -= 1
        return pin

    def settle(self):
        self._dropped.clear()
        super().settle()


class UnsealedIsFound(InMemoryStore):
    def pin(self, key, session, follow):
        return super().pin(key, session, follow=True)


class SecondWriterWins(InMemoryStore):
    def create(self, owner, key, *args):
        found = self._records.get(key)
        if found is not None and found.state == SEALED:
            self.remove(found)
        return super().create(owner, key, *args)


class TwoWritersOfOneKey(InMemoryStore):
    def create(self, owner, key, *args):
        self._records.pop(key, None)
        return super().create(owner, key, *args)


class MemoryLeaks(InMemoryStore):
    def _release(self, offset, length):
        pass

    def stats(self):
        return super().stats() | {"used_bytes": self.capacity_bytes - sum(length for _, length in self._free)}


class EvictsWhatIsPinned(InMemoryStore):
    def _could_fit(self, length):
        for record in list(self._records.values()):
            record.pins = 0
        return super()._could_fit(length)

    def settle(self):
        self._dropped.clear()
        super().settle()


class EvictsWhatIsWritten(InMemoryStore):
    def _could_fit(self, length):
        for record in [r for r in self._records.values() if r.state == CREATED][:1]:
            self.remove(record)
        return super()._could_fit(length)


class NeverEvicts(InMemoryStore):
    def _could_fit(self, length):
        return False


class NoPriority(InMemoryStore):
    def create(self, owner, key, layout_id, tokens, base, priority, ttl_s, *rest):
        return super().create(owner, key, layout_id, tokens, base, 35, ttl_s, *rest)


class NoTimeToLive(InMemoryStore):
    def create(self, owner, key, layout_id, tokens, base, priority, ttl_s, *rest):
        return super().create(owner, key, layout_id, tokens, base, priority, None, *rest)


class UnsealedIsSearched(InMemoryStore):
    def by_fingerprint(self, tokens):
        return {record.trace[0]: [key] for key, record in self._records.items()}


class AnyParentWillDo(InMemoryStore):
    def children(self, parent):
        return list(self._records)


class ExhaustedIsAMiss(InMemoryStore):
    def pin(self, key, session, follow):
        pin = super().pin(key, session, follow)
        return "miss" if pin == "exhausted" else pin


class LayersInAnyOrder(InMemoryStore):
    def mark_layer(self, record, layer):
        record.layers_ready = max(record.layers_ready, layer + 1)
        with self.changed:
            self.changed.notify_all()


class NobodyIsWoken(InMemoryStore):
    def seal(self, record):
        notify, self.changed.notify_all = self.changed.notify_all, lambda: None
        try:
            super().seal(record)
        finally:
            self.changed.notify_all = notify


class DeleteTouchesWriters(InMemoryStore):
    def delete(self, key):
        record = self._find(key)
        if record is not None and record.state == CREATED:
            self.remove(record)
            return True
        return super().delete(key)


class OldBytesShow(InMemoryStore):
    def create(self, *args):
        before = self.writable.copy()
        record = super().create(*args)
        self.writable[:] = before
        return record


class SessionsLeaveTheirBlocks(InMemoryStore):
    def end(self, owner):
        pass


class ExceptionsSeal(Writer):
    def __exit__(self, *_exc):
        self.seal()


class OneFailureFailsAll(Writer):
    def __init__(self, client, items, chain):
        super().__init__(client, items, chain)
        if "exists" in self.results:
            raise InvalidArgument("a key exists")


class UnwrittenIsSealed(Writer):
    def check_given(self, places, zero_rest=False):
        pass


class ReleaseDropsViews(Blocks):
    def release(self):
        for item in self._items:
            if not isinstance(item, str) and item._span is not None:
                item._record.pins = 0
        self._client.store._dropped.clear()
        super().release()


BREACHES = [
    (PinsDoNotHold, "test_deleted_under_a_reader"),
    (PinsDoNotHold, "test_a_view_outlives_its_context"),
    (PinsAreNotCounted, "test_pins_are_counted_and_released"),
    (UnsealedIsFound, "test_unsealed_is_found_by_nobody"),
    (SecondWriterWins, "test_a_second_put_changes_nothing"),
    (TwoWritersOfOneKey, "test_one_batch_gets_an_answer_per_key"),
    (MemoryLeaks, "test_abort_leaves_nothing"),
    (EvictsWhatIsPinned, "test_a_pinned_block_is_not_evicted"),
    (EvictsWhatIsWritten, "test_what_is_being_written_is_not_evicted"),
    (NeverEvicts, "test_a_full_pool_evicts"),
    (NoPriority, "test_low_priority_goes_first"),
    (NoTimeToLive, "test_time_to_live"),
    (UnsealedIsSearched, "test_only_what_is_sealed_is_found"),
    (AnyParentWillDo, "test_children_are_those_of_that_block"),
    (ExhaustedIsAMiss, "test_pins_beyond_the_limit_are_refused_not_missed"),
    (LayersInAnyOrder, "test_layers_are_published_in_order"),
    (NobodyIsWoken, "test_wait_pending_sees_the_other_seal"),
    (DeleteTouchesWriters, "test_a_delete_does_not_touch_what_is_being_written"),
    (OldBytesShow, "test_pads_and_meta_show_nothing_of_the_block_before"),
    (SessionsLeaveTheirBlocks, "test_closing_aborts_what_is_unsealed"),
    (SessionsLeaveTheirBlocks, "test_the_end_of_the_writers_session_reaches_the_follower"),
    (ExceptionsSeal, "test_an_exception_aborts_the_whole_batch"),
    (OneFailureFailsAll, "test_one_batch_gets_an_answer_per_key"),
    (UnwrittenIsSealed, "test_a_block_with_layers_nobody_wrote_is_not_sealed"),
    (UnwrittenIsSealed, "test_leaving_the_context_with_layers_nobody_wrote_aborts"),
    (OldBytesShow, "test_layers_nobody_wrote_become_zeros_if_asked_for"),
    (ReleaseDropsViews, "test_a_view_outlives_its_context"),
]


@pytest.mark.parametrize(("breach", "name"), BREACHES, ids=lambda value: getattr(value, "__name__", value))
def test_a_rule_taken_out_is_noticed(breach, name, monkeypatch):
    monkeypatch.setattr(case, "WAIT_S", 1.0)
    if issubclass(breach, Writer):
        monkeypatch.setattr("kvclient.testing.in_memory.Writer", breach)
    if issubclass(breach, Blocks):
        monkeypatch.setattr("kvclient.testing.in_memory.Blocks", breach)
    kind = breach if issubclass(breach, InMemoryStore) else InMemoryStore
    store = kind(capacity_bytes=16 << 20)

    class Suite(StoreConformance):
        __test__ = False

        def connect(self, **options):
            return InMemoryClient(store=store, **options)

    suite = Suite()
    suite.setup_method()
    with pytest.raises((AssertionError, KVClientError, IndexError)):
        getattr(suite, name)()
    del suite
    gc.collect()


def test_the_breaches_break_real_cases():
    for _breach, name in BREACHES:
        assert callable(getattr(StoreConformance, name))
