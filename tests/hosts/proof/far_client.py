"""A client that writes on one host and reads on another: what it reads has come from a peer, layer by layer.

What it removes, it removes on both: a delete is of one host alone.
"""

from typing import Any

from kvclient.testing.conformance.case import wait_until

FETCH_S = 30.0
MISSING, PENDING, RESIDENT = 0, 1, 2


class FarClient:
    def __init__(self, near: Any, far: Any) -> None:
        """near: where it writes; far: where it reads."""
        self._near, self._far = near, far

    def __getattr__(self, name: str) -> Any:
        return getattr(self._near, name)

    def lookup(self, keys: Any, peers: bool = False) -> Any:
        return self._near.lookup(keys, peers)

    def get(self, keys: Any, follow: bool = False, wait_s: float = 0.0, verify: bool = False) -> Any:
        """Once word of what is there has come, over there."""
        there = (RESIDENT, PENDING) if follow or wait_s else (RESIDENT,)
        told = False

        def word_came() -> bool:
            nonlocal told
            near, far = self._near.lookup(keys).states, self._far.lookup(keys, peers=True).states
            told = any(state in there for state in near)
            pairs = zip(near, far, strict=True)
            return all(at_far != MISSING for at_near, at_far in pairs if at_near in there)

        wait_until(word_came, "word came", FETCH_S)
        return self._far.get(keys, follow, wait_s or (FETCH_S if told else 0.0), verify)

    def register_layout(self, layout: Any) -> int:
        self._far.register_layout(layout)  # so that one layout has one number
        return self._near.register_layout(layout)

    def delete(self, keys: Any) -> int:
        count = self._near.delete(keys)
        self._far.delete(keys)
        return count

    def stats(self) -> dict[str, Any]:
        """What is in use, and pinned, on both."""
        near, far = self._near.stats(), self._far.stats()
        return {**near, **{name: near[name] + far[name] for name in ("used_bytes", "pins")}}

    def close(self) -> None:
        self._near.close()
        self._far.close()

    def __repr__(self) -> str:
        return repr(self._near)

    def __enter__(self) -> "FarClient":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
