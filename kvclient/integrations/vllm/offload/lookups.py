"""Which blocks are there, for the offloading spec's scheduler: what vLLM asks, one block a call.

vLLM has named a request's keys before it asks for them, in their order, until one is a miss; if it is to ask
again for one, it waits with the whole request. So one answer is given to a stretch of keys, and only its
first is known to be right: where that is to be asked again, so may those behind it be. Parts of a chunk, for
which it asks behind the whole ones, the longest first, are no stretch: it takes the first that is a hit,
whatever becomes of those before it.

Owns who asked for what in this step. Invariants: a look-up waits for nobody; only what is pinned is a hit;
nothing is pinned, brought or asked of other hosts but what vLLM asked for itself; of a key that vLLM did not
name before nothing is foreseen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, OffloadKey, ReqContext

from kvclient._core import Foreseen
from kvclient.integrations.marks import all_gave_their_word
from kvclient.integrations.pages import PENDING
from kvclient.integrations.vllm.offload.held import Held, RequestState
from kvclient.integrations.vllm.offload.naming import GROUP_BYTES, OffloadNames
from kvclient.integrations.vllm.offload.states import FOUND, States

QUEUE_S = 5.0  # beyond wait_s: how long a request waits while others' blocks are brought and compared
Note = Callable[[Sequence[OffloadKey], str], None]  # told of which keys a request was given an answer
Stretch = tuple[LookupResult, int, Note | None]  # an answer, and behind which key it no longer holds


class Lookups(OffloadingManager):
    """One per engine core. vLLM calls it from one thread; what is `_verifying` becomes `_held` on another."""

    def __init__(
        self, client: Any, names: OffloadNames, states: States, wait_s: float, wait_pending_s: float,
        lease_s: float, max_held: int, fetch_wait_s: float, words: Sequence[bytes],
    ) -> None:  # fmt: skip
        self._client, self._names, self._states = client, names, states
        self._wait_s, self._wait_pending_s = wait_s, wait_pending_s
        self._lease_s, self._max_held, self._fetch_wait_s = lease_s, max_held, fetch_wait_s
        self._words = words  # of the workers, until all have said that what is promised can be loaded
        self._lock = threading.Lock()
        self._requests: dict[str, RequestState] = {}
        self._held: dict[OffloadKey, Held] = {}
        self._leaving: list[Held] = []  # being loaded at a reset: vLLM never says when that has ended
        # Who asked for what. Keys share a set: it is never added to.
        self._wanted: dict[OffloadKey, set[str]] = {}  # of this step, to be verified
        self._sought: dict[OffloadKey, set[str]] = {}  # of this step, to be asked of other hosts
        self._verifying: dict[OffloadKey, set[str]] = {}
        # What vLLM is asking for: a request's keys, of which a stretch has one answer.
        self._context: ReqContext | None = None
        self._firsts: dict[bytes, OffloadKey] = {}  # of its groups that were asked for, where that began
        self._keys: list[OffloadKey] = []
        self._at = 0
        self._note: Note | None = None
        self._foreseen = Foreseen(self._look)
        self.__dict__["lookup"] = self._foreseen.ask  # 500 calls: 14 us instead of 40

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._foreseen.ask(key, req_context)

    def _look(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        """For a key that was not foreseen."""
        self._place(key, context)
        if not self._names.usable(key) or (self._words and not self._may_promise()):
            return LookupResult.MISS
        keys, at = self._keys, self._at
        with self._lock:
            request = self._requests.setdefault(context.req_id, RequestState())
            request.until = time.monotonic() + self._lease_s
            found = self._known(keys, at, request)
            if found is None:
                room = self._room()
                stop, note = self._first_known(keys, at, request), self._want
                if key in self._wanted:  # by another; maybe because of those in front of it
                    stop, room, note = _end_of(keys, at, self._wanted, request.missed), len(keys), self._join
        if found is None:
            found = self._unknown(keys, at, stop, room, request, note)
        answer, stop, self._note = found
        self._foreseen.begin(keys, at, stop, context, answer)
        return answer

    def _place(self, key: OffloadKey, context: ReqContext) -> None:
        """Finds the key among those of its request: the next one, or the first of a group that was not asked
        for, or is asked for anew. From a window's end vLLM goes backwards: then it is alone."""
        self._settle()
        if context is not self._context:
            self._firsts.clear()
            self._context = context
        elif self._at < len(self._keys) and self._keys[self._at] == key:
            return
        group = bytes(key[-GROUP_BYTES:])
        positions: Any = getattr(context, "_offload_key_positions", {})  # in vLLM's order, of all groups
        size = self._names.divided.get(group, 1)
        self._keys, self._at = [key], 0
        if key not in positions or positions[key] % size or self._firsts.setdefault(group, key) != key:
            return
        self._keys = list(positions)
        if size > 1 or self._names.groups > 1:
            whole = (each for each, end in positions.items() if not end % size)
            self._keys = [each for each in whole if each[-GROUP_BYTES:] == group]
        self._at = self._keys.index(key)

    def _settle(self) -> None:
        """Notes which keys of the stretch were asked for; those behind them were not."""
        if asked := self._foreseen.end():
            start, self._at = self._at, self._at + asked
            if self._note is not None and self._context is not None:
                self._note(self._keys[start : self._at], self._context.req_id)

    def _end(self) -> None:
        """What was answered may be another answer from now on."""
        self._settle()
        self._context = None

    # ---------------------------------------------------------------- answers

    def _known(self, keys: list[OffloadKey], at: int, request: RequestState) -> Stretch | None:
        """Of what is held for somebody, on its way, or was missed. Under the lock."""
        key, mine = keys[at], request.keys
        if key in mine:
            if mine.issuperset(keys[at:] if at else keys):
                return LookupResult.HIT, len(keys), None
            return LookupResult.HIT, _end_of(keys, at, mine), None
        if key in self._held:
            return LookupResult.HIT, _end_of(keys, at, self._held, mine), self._share
        coming = next((of for of in (self._verifying, self._sought) if key in of), None)
        late = request.verified_until is not None and time.monotonic() >= request.verified_until
        if coming is self._verifying and late:
            request.missed.add(key)
        if key in request.missed:
            return LookupResult.MISS, at + 1, None
        if coming is None:
            return None
        return LookupResult.RETRY, _end_of(keys, at, coming, request.missed), self._join

    def _first_known(self, keys: list[OffloadKey], at: int, request: RequestState) -> int:
        """Where a stretch of which nothing is known ends. Under the lock."""
        here = (self._held, self._verifying, self._wanted, self._sought)
        if not (any(here) or request.missed):
            return len(keys)
        rest = keys[at + 1 :]
        every: tuple[dict[OffloadKey, Any], ...] = (*here, dict.fromkeys(request.missed))
        known = [of for of in every if of and not of.keys().isdisjoint(rest)]
        stops = (i for i, key in enumerate(rest, at + 1) if any(key in of for of in known))
        return next(stops, len(keys)) if known else len(keys)

    def _room(self) -> int:
        held = len(self._held) + len(self._leaving)
        return self._max_held - held - len(self._verifying) - len(self._wanted) - len(self._sought)

    def _unknown(
        self, keys: list[OffloadKey], at: int, stop: int, room: int, request: RequestState, note: Note
    ) -> Stretch:
        """What the store says. Of the keys that follow one that is there it is asked for few, ever farther
        apart: the first of those that is not there ends the stretch; the thread that pins them looks at each.
        Other hosts are asked once a request, so with those each is looked at here."""
        places = list(range(at, stop)) if self._fetch_wait_s else _places(at, stop)
        states = self._states.of([keys[place] for place in places])
        there = len(states) - len(states.lstrip(FOUND))
        if there and room > 0:
            end = places[there] if there < len(places) else stop
            return LookupResult.RETRY, min(end, at + room), note
        if there:
            return LookupResult.MISS, at + 1, None
        claimed = [False] * len(states)  # an engine computes it
        if self._wait_pending_s and states[0] != PENDING:
            claimed[:1] = self._states.claimed(keys[at : at + 1])
        if (states[0] == PENDING or claimed[0]) and self._may_wait(request):
            return LookupResult.HIT_PENDING, len(keys), None  # it waits, whatever is behind
        if states[0] == PENDING or not self._fetch_wait_s or room <= 0:
            return LookupResult.MISS, at + 1, None
        if self._wait_pending_s and not claimed[0]:
            claimed[1:] = self._states.claimed(keys[at + 1 : stop])
        others = (i for i in range(1, len(states)) if states[i] == PENDING or claimed[i])
        seek = self._seek if note == self._want else note  # what another wants is looked for once
        return LookupResult.RETRY, at + min(room, next(others, stop - at)), seek

    def _may_promise(self) -> bool:
        """A load that fails ends the engine: nothing is promised before every worker's self-test passed."""
        if all_gave_their_word(self._client, self._words):
            self._words = ()
        return not self._words

    def _may_wait(self, request: RequestState) -> bool:
        now = time.monotonic()
        if request.waited_until is None:
            request.waited_until = now + self._wait_pending_s
        return now < request.waited_until

    # ---------------------------------------------------------------- what was asked for

    def _want(self, asked: Sequence[OffloadKey], req_id: str) -> None:
        self._ask_for(asked, req_id, self._wanted)

    def _seek(self, asked: Sequence[OffloadKey], req_id: str) -> None:
        self._ask_for(asked, req_id, self._sought)

    def _ask_for(self, asked: Sequence[OffloadKey], req_id: str, where: dict[OffloadKey, set[str]]) -> None:
        requests = {req_id}
        where.update(dict.fromkeys(asked, requests))
        self._begin_to_wait(req_id)

    def _begin_to_wait(self, req_id: str) -> None:
        request = self._requests[req_id]
        if request.verified_until is None:
            request.verified_until = time.monotonic() + self._wait_s + self._fetch_wait_s + QUEUE_S

    def _share(self, asked: Sequence[OffloadKey], req_id: str) -> None:
        with self._lock:
            for key in asked:
                self._held[key].requests.add(req_id)
            self._requests[req_id].keys.update(asked)

    def _join(self, asked: Sequence[OffloadKey], req_id: str) -> None:
        with self._lock:
            self._begin_to_wait(req_id)
            for key in asked:
                if (held := self._held.get(key)) is not None:  # it came meanwhile
                    held.requests.add(req_id)
                    self._requests[req_id].keys.add(key)
                for of in (self._verifying, self._wanted, self._sought):
                    if req_id not in of.get(key, (req_id,)):
                        of[key] = of[key] | {req_id}


def _end_of(
    keys: list[OffloadKey], at: int, inside: Container[OffloadKey], outside: Container[OffloadKey] = ()
) -> int:
    """How far the keys from `at` on are in the one, and not in the other."""
    ends = (i for i in range(at, len(keys)) if keys[i] not in inside or keys[i] in outside)
    return next(ends, len(keys))


def _places(at: int, stop: int) -> list[int]:
    """The first of those from `at` to `stop`, three, fifteen, 63 behind it and so on, and the last."""
    count = stop - at
    places = [at + 4**power - 1 for power in range((count.bit_length() + 1) // 2)]
    return places if places[-1] == stop - 1 else [*places, stop - 1]
