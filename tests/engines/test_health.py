"""Goal: one log line when an engine's store goes and one when it is back, however many threads ask and
however often a call fails meanwhile; a page that could not be read back once is no wrong one; a lease of
nothing holds nothing, leases can be counted at any time, and a reader who comes behind its lease's end does
not end another's; an eviction explains a lost block of its own try alone; a word
that two give at once stands; what a client raises, on purpose or not, is a miss.

Method: the classes alone, with a client that is told what to be, one in the process, or a daemon's.
"""

import contextlib
import gc
import itertools
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import kvclient
from kvclient.errors import InvalidArgument, Unavailable
from kvclient.integrations import health as module
from kvclient.integrations.health import Health
from kvclient.integrations.leases import Leases
from kvclient.integrations.marks import Word, all_gave_their_word
from kvclient.integrations.objects import Objects
from kvclient.integrations.pages import Pages
from kvclient.integrations.self_test import TRIES, WRONG_LATER, Tried, try_at_start
from kvclient.integrations.unsure import Unsealed


def made(lines, degraded=False):
    logger = SimpleNamespace(warning=lambda text, *values: lines.append(text % values))
    return Health(SimpleNamespace(degraded=degraded), logger)


def test_two_threads_that_look_at_once(monkeypatch):
    """The second looks while the first reckons how long the store was away."""
    lines = []
    health = made(lines)
    health.failed("a load", "for a reason")
    clock, second = module.time.monotonic, threading.Thread(target=health.look)

    def meanwhile():
        if not second.ident:
            second.start()
            second.join(0.2)  # it may have to wait for us
        return clock()

    monkeypatch.setattr(module.time, "monotonic", meanwhile)
    for _ in range(2):  # the failure was behind the last look
        health.look()
    second.join()
    assert ["goes on without" in lines[0], "is back" in lines[1]] == [True, True]
    assert len(lines) == 2
    assert not health.away


def test_what_fails_at_every_step_is_said_once():
    lines = []
    health = made(lines)
    for _ in range(5):
        health.failed("a load", "no pin is left")
        health.look()
    assert len(lines) == 1 and "no pin is left" in lines[0]
    assert health.away and health.failures_total == 5
    health.look()
    assert len(lines) == 2 and "is back" in lines[1]


@pytest.fixture
def figures(monkeypatch):
    """What prometheus_client's figures say, by name; it refuses a name a second time."""
    now = {}

    class Figure:
        def __init__(self, name, says, multiprocess_mode=None):
            if name in now:
                raise ValueError(f"Duplicated timeseries: {name}")
            self._name, now[name] = name, 0

        def set(self, value):
            now[self._name] = value

        def inc(self):
            now[self._name] += 1

    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Gauge=Figure, Counter=Figure))
    monkeypatch.setattr(module, "_figures", {})
    return now


def test_the_gauge_is_of_all_that_are_away(figures):
    """And not of one that has ended, with a word or without."""
    client, logger = SimpleNamespace(degraded=False), SimpleNamespace(warning=lambda *_: None)
    first, second = (Health(client, logger, "test") for _ in range(2))
    for health in (first, second):
        health.failed("a load", "for once")
        health.look()
    said = []
    for step in (second.look, first.look, lambda: first.failed("a load", "again"), lambda: first.close()):
        step()
        said.append(figures["test:kvstored_degraded"])
    assert said == [1, 0, 1, 0]
    second.failed("a load", "again")
    del health, second, step
    gc.collect()
    Health(client, logger, "test")
    assert figures["test:kvstored_degraded"] == 0


def test_a_figure_that_cannot_be_made_ends_no_start(figures):
    figures["test:kvstored_failures"] = "somebody's"
    client, lines = SimpleNamespace(degraded=False), []
    logger = SimpleNamespace(warning=lambda text, *values: lines.append(text % values))
    for _ in range(2):
        Health(client, logger, "test").failed("a load", "for once")
    assert figures == {"test:kvstored_degraded": 1, "test:kvstored_failures": "somebody's"}
    assert ["no figure test:kvstored_failures" in line for line in lines] == [True, False, False], lines


def test_two_that_begin_at_once_make_one_pair_of_figures(monkeypatch):
    both, made_of = threading.Barrier(2), []

    def figure(name, *_, **__):
        made_of.append(name)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # the other comes this far only where nothing holds it
        return SimpleNamespace(set=lambda _: None, inc=lambda: None)

    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Gauge=figure, Counter=figure))
    monkeypatch.setattr(module, "_figures", {})
    client, logger = SimpleNamespace(degraded=False), SimpleNamespace(warning=lambda *_: None)
    threads = [threading.Thread(target=Health, args=(client, logger, "test")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made_of == ["test:kvstored_degraded", "test:kvstored_failures"]


def test_an_engines_own_figures_say_it(monkeypatch, figures):
    """One pair a process."""
    client, logger = SimpleNamespace(degraded=False), SimpleNamespace(warning=lambda *_: None)
    Health(client, logger, "test")
    health, heard = Health(client, logger, "test"), []
    for fails in (False, True, False, False):
        if fails:
            health.failed("a load", "for once")
        else:
            health.look()
        heard.append((figures["test:kvstored_degraded"], figures["test:kvstored_failures"]))
    assert heard == [(0, 0), (1, 1), (1, 1), (0, 1)]
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    Health(client, logger, "an engine without").failed("a load", "for once")


def test_what_is_over_does_not_come_back():
    lines = []
    health = made(lines)
    health.failed("a load", "no pin is left")
    health.end("a block came back changed")
    for _ in range(3):
        health.look()
    health.failed("a load", "a block came back changed")
    health.look()
    assert health.away
    assert ["came back changed" in line for line in lines] == [False, True]


def test_a_wrong_directory_is_named_at_the_start(tmp_path):
    lines = []
    client = kvclient.connect(tmp_path / "typo", on_error="miss", timeout_s=0.1)
    logger = SimpleNamespace(warning=lambda text, *args: lines.append(text % args))
    assert not Health(client, logger).at_start("LMCache")
    (line,) = lines
    assert str(tmp_path / "typo") in line and "LMCache runs without" in line
    client.close()


def test_leases_are_counted_while_another_thread_takes_one():
    leases = Leases(60.0, 100)
    for name in (b"a", b"b", b"c"):
        leases.hold([name], SimpleNamespace(release=lambda: None))
    mine = ([b"d"], SimpleNamespace(release=lambda: None))
    other = threading.Thread(target=leases.hold, args=mine)

    class Counted(set):
        def __len__(self):
            if not other.ident:
                other.start()
                other.join(0.2)  # it may have to wait for us
            return 1

    leases._held[0].keys = Counted([b"a"])
    assert leases.count == 3
    other.join()
    leases.close()


def test_a_lease_of_nothing_is_given_back_at_once():
    released = []
    leases = Leases(60.0, 4)
    leases.hold([], SimpleNamespace(release=lambda: released.append(1)))
    assert released == [1] and leases.count == 0
    leases.close()


def test_a_reader_who_comes_too_late_ends_no_other_readers_lease():
    """Engines that say no more than keys: SGLang at a load, LMCache at an unlock."""
    released = []

    def hold(name, *keys):
        return leases.hold(keys, SimpleNamespace(release=lambda: released.append(name)))

    leases = Leases(60.0, 2)
    hold("no room", b"a", b"b")
    hold("second", b"a", b"b")
    assert released == ["no room"]
    leases.used([b"a"])
    leases.used([b"b"])
    assert released == ["no room"], "it was the first reader that came"
    leases.used([b"b", b"a"])
    assert released == ["no room", "second"]

    released.clear()
    leases.close()
    leases = Leases(60.0, 2)
    hold("no time", b"a")
    leases._timer.cancel()
    leases._held[0].until, leases._timer = time.monotonic(), threading.current_thread()
    leases._expire()  # as its timer would, however late
    assert released == ["no time"]
    hold("third", b"a")
    leases.used([b"a"])
    assert released == ["no time"] and leases.count == 1

    hold("fourth", b"a", b"b")  # no room for the third
    for gone in leases._over:
        gone.until -= 120.0
    leases.used([b"a", b"b"])
    assert released == ["no time", "third", "fourth"], "nobody waits for ever for a reader"
    ended = [hold("fifth", b"a", b"b"), hold("sixth", b"c")]
    leases.end(ended)
    assert not leases.count and not leases._over
    leases.close()


@pytest.mark.parametrize("times", [TRIES - 1, TRIES])
def test_a_page_that_cannot_be_read_back_is_wrong_only_if_that_is_so_again_and_again(monkeypatch, times):
    """No pin may be left for a moment."""
    lines = []
    logger = SimpleNamespace(warning=lambda text, *values: lines.append(text % values))
    with kvclient.InMemoryClient(8 << 20) as client:
        pages = Pages(client, Health(client, logger), 0.1)
        layout, content = pages.format([4096]), [[np.full(4096, 7, np.uint8)]]
        pages.try_later()
        with monkeypatch.context() as hindered:
            hindered.setattr(Pages, "get", lambda *_: [False])
            put = [pages.put([bytes([turn]) * 32], layout, content) for turn in range(times)]
        assert put == [[True]] * (TRIES - 1) + [[False]] * (times - TRIES + 1)
        assert pages.put([b"e" * 32], layout, content) == [times < TRIES]
        assert any(WRONG_LATER in line for line in lines) == (times == TRIES)


@pytest.mark.parametrize(("seen", "ends"), [([0, 1, 1, 1], True), ([0, 1, 2, 3], False)])
def test_an_eviction_explains_no_more_than_the_try_in_which_it_was(seen, ends):
    """A block that is not found again ends the start, unless each try met an eviction: a store that others
    fill evicts now and then."""
    counts = iter([at for pair in itertools.pairwise(seen) for at in pair])
    client = SimpleNamespace(stats=lambda: {"evictions": next(counts)}, degraded=False)
    lines, lost = [], Tried(stored=True, loaded=False, same=False)
    health = Health(client, SimpleNamespace(warning=lambda text, *values: lines.append(text % values)))
    if ends:
        with pytest.raises(InvalidArgument, match="not found again"):
            try_at_start(client, health, lambda: lost, (0, 1))
    else:
        assert not try_at_start(client, health, lambda: lost, (0, 1))
        assert "evicted at once" in lines[0]


@pytest.mark.parametrize("kind", [Unavailable, OSError, RuntimeError, ValueError, MemoryError])
def test_whatever_a_client_fails_with_is_a_miss(kind):
    """Else it would end the engine, or a thread that others wait for."""

    def fail(*_, **__):
        raise kind("no room")

    names = ("lookup", "get", "create", "prefetch", "delete")
    client = SimpleNamespace(**dict.fromkeys(names, fail), degraded=False, register_layout=lambda _: 1)
    health = Health(client, SimpleNamespace(warning=lambda *_: None))
    pages, key, page = Objects(client, health, 0.1), [b"k" * 32], [[np.zeros(64, np.uint8)]]
    assert pages.states(key) == b"\0" and pages.put(key, 1, page) == [False] == pages.get(key, page)
    assert pages.pin(key) is None and pages.delete(key) == 0 and pages.length_of(key[0]) is None
    pages.prefetch(key)
    Word(client, key[0]).give()
    assert not all_gave_their_word(client, key)
    sealed = SimpleNamespace(seal=fail, abort=lambda: gone.append(True))
    gone, failed = [], []
    unsealed = Unsealed(60.0, failed.append)
    unsealed.end(1, [sealed])
    unsealed.begin([1], [])
    assert gone == [True] and isinstance(failed[0], kind)
    assert health.failures_total >= 7


def test_a_word_that_two_threads_give_at_once_stands(daemon):
    """The second gives it between the first one's look and its mark."""
    kvstored = daemon()
    with kvstored.connect() as client, kvstored.connect() as scheduler:
        second = threading.Thread(target=lambda: word.give())

        def lookup(keys):
            seen = client.lookup(keys)
            if not second.ident:
                second.start()
                second.join()
            return seen

        asked = SimpleNamespace(lookup=lookup, create=client.create, register_layout=client.register_layout)
        word = Word(asked, b"w" * 32)
        word.give()
        assert second.ident and all_gave_their_word(scheduler, [b"w" * 32])
        asked.lookup = fails
        word.give()
        assert all_gave_their_word(scheduler, [b"w" * 32]), "a look that failed took it back"


def fails(_keys):
    raise Unavailable("the daemon does not answer")
