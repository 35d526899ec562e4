"""Goal: the orderings of docs/design.md §5 to §7 that a run on x86-64 cannot show stand in the source: the
fences of the pin protocol, of the sequence locks and of the wakes, the order of mapping, of granting and of
giving up.

Method: the steps must stand in the body of the function in that order. What each step is for is shown by the
litmus of native/tests/pins_test.cc with the fences as arguments; there a hundred instructions hide the real
ones. A second test takes each step out and sees the first fail.
"""

import re
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "native/core"
ACQUIRE = "std::memory_order_acquire"

# file, where the body begins, its steps in order
ORDERINGS = [
    # A reader: pin, fence, look again. The daemon: (generations changed before) fence, look at the pins.
    (
        "client.cc", "void Client::pin_all(",
        ("at.take_pins(", "fence_full();", "at.current()", "board->allowance()", "index.control("),
    ),
    # An export and the batch's end: each says what it does before it looks what the other does.
    ("block_batch.cc", "void BlockBatch::close(", ("closed_.exchange(true)", "exported_.load()")),
    (
        "block_batch.cc", "void BlockBatch::hold(",
        ("exported_.store(true)", "closed_.load()", "compare_exchange"),
    ),
    # What was found counts only if no other daemon has taken over meanwhile.
    ("client.cc", "std::vector<uint8_t> Client::lookup(", ("find_all(", "presence(", "at->current()")),
    (
        "store_pins.cc", "void Store::scan_zombies(",
        ("releases()", "fence_full();", "each_pin_in_slices(", "free_zombie("),
    ),
    # A pin that goes while the pins are read was seen gone, or counts beyond what was read before.
    ("session_file.cc", "void PinBoard::clear(", (".store(0,", "released", "free_.insert(")),
    ("store_pins.cc", "void Store::unpark(", ("releases()", "mark_held(", "policy_.insert(")),
    # Who waits says so before its last look; who changes looks at who waits behind the change.
    ("session_file.h", "explicit Waiting(", ("fetch_add(1", "fence_full();")),
    ("store_bytes.cc", "explicit WaitingHere(", ("fetch_add(1", "fence_full()")),
    ("store.cc", "bool Store::anybody_waits(", ("fence_full();", "waiting_here_", "waiting.load(")),
    ("store.cc", "std::vector<Done> Store::seal(", ("seal_one(", "anybody_waits()", "futex_wake_all(")),
    # Sequences: odd, release fence, data, even with release; acquire, data, acquire fence, compare.
    ("index.h", "explicit Writing(", ("before_ | 1, std::memory_order_relaxed", "fence_release();")),
    ("index.h", "~Writing()", ("(before_ | 1) + 1, std::memory_order_release",)),
    (
        "index.cc", "bool Index::read_record(",
        (f"sequence.load({ACQUIRE})", "r.key[i]", "r.expiry_s", "fence_acquire();", "!= before"),
    ),
    (
        "index.cc", "Find Index::probe(",
        (f"sequence.load({ACQUIRE})", "candidates(", "overflow.load", "fence_acquire();", "!= before"),
    ),
    # The session's page is mapped before the pool, and (members go in reverse) unmapped behind it.
    ("attachment.cc", "void Attachment::map(", ("board = ", "pool_ = Mapping(", "writable_ = Mapping(")),
    ("attachment.h", "class Attachment ", ("> board;", "Mapping table_, progress_, pool_, writable_;")),
    # Allocate, record, reply; unlink, state, free. One store of the state commits.
    ("store.cc", "void Store::grant(", ("arena_.allocate(", "enter(request, item", "out = {Grant::Granted")),
    ("store.cc", "bool Store::enter(", ("Writing writing(", "Event::Create", "index_.insert_key(")),
    ("store_reclaim.cc", "void Store::to_zombie(", ("index_.erase(", "transition(", "add_zombie(")),
    # Adoption: the epoch is odd, all sessions and so all pins are known before a record is kept, it is even.
    (
        "store_adopt.cc", "void Store::adopt(",
        ("epoch.store(", "index_.clear()", "adopt_sessions();", "adopt_records();", "epoch.fetch_add(1"),
    ),
    # The lock is taken before anybody else can hold the description; the magic makes the page one, last.
    ("session_file.cc", "SessionFile SessionFile::create(", ("O_EXCL", "::flock(", "kSessionMagic")),
]  # fmt: skip


def body(text: str, start: str) -> str:
    """What stands between the braces that open behind `start`, comments left out."""
    text = re.sub(r"//[^\n]*", "", text)
    assert text.count(start) == 1, f"{start!r} stands there {text.count(start)} times"
    at = text.index("{", text.index(start))
    depth = 0
    for end in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[text.index(start) : end]
    raise AssertionError(f"{start!r} does not end")


def missing(text: str, steps: tuple[str, ...]) -> str | None:
    """The first step that does not stand behind the one before it."""
    at = 0
    for step in steps:
        at = text.find(step, at)
        if at < 0:
            return step
        at += len(step)
    return None


@pytest.mark.parametrize(("file", "start", "steps"), ORDERINGS, ids=lambda value: str(value)[:40])
def test_the_steps_stand_in_order(file, start, steps):
    text = body(next(CORE.rglob(file)).read_text(), start)
    assert (step := missing(text, steps)) is None, f"{file}: {start} lacks {step!r} where it has to stand"
    for step in steps:
        assert missing(text.replace(step, ""), steps) is not None, f"{step!r} could be taken out unseen"


@pytest.mark.parametrize(
    "call",
    [
        "io_uring",  # its transfers land in pool memory after their process is dead
        "umask(",  # the process's: another thread made directories of the disk 0600 meanwhile
    ],
)
def test_calls_that_stand_nowhere(call):
    for path in CORE.rglob("*"):
        if path.is_file():
            code = re.sub(r"//[^\n]*", "", path.read_text())
            assert call not in code, path
