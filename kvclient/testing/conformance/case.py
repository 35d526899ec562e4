"""What all conformance cases share: clients that are closed, blocks whose bytes follow from their key,
waiting.

Owns the clients a case opens; never decides what is right. Invariant: the bytes of a block are a function
of its key and layer, so a wrong, foreign or half-written block cannot be mistaken for the right one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvclient.blocks.layout import Geometry
from kvclient.errors import InvalidArgument

WAIT_S = 10.0  # how long anything that must happen may take on a busy machine


def geometry(
    layers: int = 4, heads: int = 2, dim: int = 8, tokens: int = 16, meta: tuple[int, int] = (80, 12)
) -> Geometry:
    """A layout of float16 blocks; the default one takes 8 KiB of pool."""
    per_token = 2 * heads * dim * 2
    return Geometry(layers, 2, heads, dim, "float16", tokens, 0, *meta, (per_token,) * layers)


SMALL = geometry()
BIG = geometry(layers=2, heads=16, dim=64, tokens=128)  # 1 MiB of layers


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def pattern(key: bytes, layer: int, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes that layer of that block must have."""
    seed = int.from_bytes(
        hashlib.blake2b(key + layer.to_bytes(4, "little"), digest_size=8).digest(), "little"
    )
    words = np.random.default_rng(seed).integers(0, 1 << 16, size=shape, dtype=np.uint16)
    return (words & 0x7BFF).view(np.float16)  # finite numbers only: they compare equal to themselves


def fill(block: Any, layers: int = SMALL.num_layers) -> None:
    """Writes the right bytes into all layers and the meta area."""
    for layer in range(layers):
        target = block.layer(layer)
        target[...] = pattern(block.key, layer, target.shape)
    if block.meta is not None:  # a door may carry layers only
        block.meta[:32] = block.key


def check(block: Any, layers: int = SMALL.num_layers) -> None:
    """Asserts the right bytes in all layers and the meta area."""
    assert block is not None, "a miss"
    for layer in range(layers):
        found = block.layer(layer)
        assert np.array_equal(found, pattern(block.key, layer, found.shape)), f"wrong bytes in layer {layer}"
    if block.meta is not None:
        assert bytes(block.meta[:32]) == block.key, "wrong bytes in the meta area"


@contextlib.contextmanager
def raises(*kinds: type[BaseException]) -> Iterator[None]:
    """The block must raise one of these."""
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"expected {', '.join(kind.__name__ for kind in kinds)}; nothing was raised")


@contextlib.contextmanager
def names(*words: str) -> Iterator[None]:
    """The block must raise an InvalidArgument whose text has all these words."""
    try:
        yield
    except InvalidArgument as error:
        assert all(word in str(error) for word in words), f"{error} names not all of {words}"
        return
    raise AssertionError(f"expected InvalidArgument with {words}; nothing was raised")


def wait_until(condition: Callable[[], object], what: str, timeout_s: float | None = None) -> None:
    """Looks again, ever more rarely, until the condition holds. Fails at the deadline."""
    timeout_s = WAIT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    pause_s = 0.0005
    while not condition():
        assert time.monotonic() < deadline, f"not true after {timeout_s} s: {what}"
        pause.wait(pause_s)
        pause_s = min(2 * pause_s, 0.02)


class Case:
    """Base of the groups of cases.

    `lacks` names abilities this door does not have: "pins" (views in shared memory), "max_pins", "follow",
    "ordered_marks" (a layer marked too early is refused), "wait_pending", "copies" (into a granted block),
    "zeroed" (pads), "unwritten" (a block with layers nobody wrote is refused), "sealing" (in the next
    create), "chains" (tokens and positions), "search" (find and children), "at_once" (a
    seal is seen when it has returned).
    """

    lacks: frozenset[str] = frozenset()

    def connect(self, **options: Any) -> Any:
        """A new client on the store under test. Options: max_pins."""
        raise NotImplementedError

    def flush(self) -> None:
        """Removes what a case left sealed. The default deletes the keys the case made."""
        with self.connect() as client:
            client.delete(self._made)

    def setup_method(self) -> None:
        self._clients: list[Any] = []
        self._made: list[bytes] = []
        self.client = self.open()
        self.small = self.client.register_layout(SMALL.to_blob())
        self.used_before = self.used()

    def teardown_method(self) -> None:
        self.flush()
        observer = self.connect()
        try:
            for client in self._clients:
                client.close()
            wait_until(
                lambda: observer.stats()["used_bytes"] == self.used_before,
                f"memory in use returns to {self.used_before} after the case",
            )
        finally:
            observer.close()

    def open(self, **options: Any) -> Any:
        """A client that is closed after the case."""
        client = self.connect(**options)
        self._clients.append(client)
        return client

    def needs(self, *abilities: str) -> None:
        missing = self.lacks.intersection(abilities)
        if missing:
            raise unittest.SkipTest(f"this door has no {', '.join(sorted(missing))}")

    def keys(self, count: int) -> list[bytes]:
        made = new_keys(count)
        self._made.extend(made)
        return made

    def put(
        self, count: int = 1, client: Any = None, keys: list[bytes] | None = None, **options: Any
    ) -> list[bytes]:
        """Creates, fills and seals blocks of the small layout; returns their keys."""
        keys = self.keys(count) if keys is None else keys
        with (client or self.client).create(keys, self.small, **options) as writer:
            assert writer.results == ["granted"] * len(keys), writer.results
            for index in writer.granted:
                fill(writer[index])
        return keys

    def used(self) -> int:
        return self.client.stats()["used_bytes"]

    def pinned(self, count: int) -> None:
        """So many blocks are pinned, at once or a moment later: who sent a block to another host, or took one
        from a closed client, lets go of its own pin then."""
        wait_until(lambda: self.client.stats()["pins"] == count, f"{count} pins")

    def states(self, keys: list[bytes], client: Any = None) -> list[int]:
        return list((client or self.client).lookup(keys).states)

    def in_thread(self, call: Callable[[], object]) -> Callable[[], Any]:
        """Runs `call` in a thread; the result, called, joins it and returns what it returned or raises."""
        outcome: dict[str, Any] = {}

        def run() -> None:
            try:
                outcome["value"] = call()
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def join() -> Any:
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"{call} did not return within {WAIT_S} s"
            if "error" in outcome:
                raise outcome["error"]
            return outcome["value"]

        return join
