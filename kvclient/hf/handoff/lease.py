"""For how long a prefiller holds blocks for who decodes them, as vLLM's NIXL connector counts it: so long
after the handoff, and after each word of a decoder.

A word is a block of a few bytes in the decoder's store, under a key made of the handoff's mark. It lives two
thirds of the lease, and is put again each sixth. Hosts tell each other what they have, so the prefiller sees
it by a look-up, whichever host it is on, and there is no other connection, and nothing to clean up: the word
of a decoder that died ends by itself.

Owns the word and the looking for it. Never holds a block of KV. Invariant: a lease ends, at the latest, its
length after the last decoder is gone, and no error of the store keeps it alive.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

from kvclient.blocks.layout import Layout
from kvclient.errors import KVClientError

BEATS = 6  # of one lease
WORD = Layout(1, 1, 16, "uint8", block_tokens=1, kv_per_layer=1, meta_fixed=0, meta_per_token=0, name="lease")


def word_of(mark: bytes) -> bytes:
    """The key of the block that says: still wanted."""
    return hashlib.sha256(b"kvstored handoff lease\0" + mark).digest()


class Lease:
    """From here on this host says that the handoff is wanted; until close()."""

    def __init__(self, client: Any, mark: bytes, lease_s: float) -> None:
        self._client, self._word, self._lease_s = client, word_of(mark), lease_s
        self._over = threading.Event()
        self._say()
        self._thread = threading.Thread(target=self._go_on, name="kvclient-lease", daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        while not self._over.wait(self._lease_s / BEATS):
            self._say()

    def _say(self) -> None:
        with contextlib.suppress(KVClientError):  # without a store there is nobody to tell
            layout = self._client.register_layout(WORD)
            self._client.delete([self._word])
            with self._client.create([self._word], layout, ttl_s=self._lease_s * 4 / BEATS) as writer:
                if writer[0] is not None:
                    writer.seal(0, zero_rest=True)

    def close(self) -> None:
        """Takes the word back. Another decoder of this host says it again with its next beat."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        with contextlib.suppress(KVClientError):
            self._client.delete([self._word])

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def outlast(
    client: Any, mark: bytes, lease_s: float, over: threading.Event,
    now: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Returns when the lease has ended: nobody came in time, whoever came is gone, or `over` is set."""
    word, end = word_of(mark), now() + lease_s
    with contextlib.suppress(KVClientError):
        while now() < end and not over.wait(lease_s / BEATS / 5):
            if client.lookup([word], peers=True).states[0]:
                end = now() + lease_s * 2 / BEATS  # and as long as the word lives by itself
