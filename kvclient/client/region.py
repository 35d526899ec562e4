"""A region: memory of the pool that a client's own allocator divides, and blocks published out of it.

Owns the rules for what may be named in it, and the blocks some of whose layers are still to come. The daemon
never looks inside. A block whose buffers lie as its layout says is sealed where it is, if that is wanted, and
its memory is the allocator's again once it was given back; of any other the buffers are copied into a block
of its own, so that a sealed block cannot be changed by whoever goes on using the region.
Invariant: no byte outside the region is read, whatever offsets are named; an item that is refused changes no
other; memory of a block that is sealed here is not given out again before give_back() says so.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvclient import _core
from kvclient.blocks.layout import Geometry
from kvclient.checks import check_bounds, whole_seconds
from kvclient.client.buffers import ALIGNMENT, AXES, MAX_PARTS, NOT_HERE, counts_of, in_order, where_it_lies
from kvclient.errors import (
    BlockLost,
    Closed,
    Detached,
    InvalidArgument,
    KVClientError,
    LayoutLost,
    Unavailable,
)

MAX_REGION_BYTES = 1 << 46
UNKNOWN = "the daemon did not answer: it may be sealed, and its memory is no part of the region any more"


class Registered(NamedTuple):
    """What became of one item. word: "sealed"; "open", its other layers are awaited; "exists", "pending" or
    "no_space", as create says it; "lost", its layers of before are gone with a daemon; "unavailable"; or
    "refused", and why. in_place: it was sealed where it lies; if not, though that was wanted, `reason` says
    why it was copied. Of one that is "lost" in place nobody knows: the daemon was asked and did not answer,
    and its memory is no part of the region any more."""

    word: str
    reason: str = ""
    in_place: bool = False


class Loaded(NamedTuple):
    """What became of one block. word: "loaded"; "missing"; "pending", these layers of a followed block are
    not all there; "corrupt", a checksum is wrong and the buffers hold no block; "lost", its writer ended or
    the daemon asked it back; or "refused", and why: nothing was written."""

    word: str
    reason: str = ""


@dataclass
class _Open:
    """A block some of whose layers are still to come."""

    writer: Any
    index: int
    layout_id: int
    tokens: int
    layers: int
    seen: set[int] = field(default_factory=set)
    marked: int = 0  # leading layers that followers see


class Owner(Protocol):
    """What a region asks of its KVClient."""

    _native: Any
    _ids: tuple[int, dict[int, int]]

    def _call(self, ask: Callable[[Any], Any]) -> Any: ...

    def _again(self, ask: Callable[[Any], Any]) -> Any: ...

    def _geometry(self, layout_id: int) -> Geometry: ...

    def create(self, keys: Any, layout_id: int, priority: int, ttl_s: Any, token_counts: Any) -> Any:
        """As KVClient.create()."""


class Region:
    """Made by KVClient.register_region(). Thread-safe; calls of several threads run one after the other."""

    def __init__(self, client: Owner, length: int) -> None:
        check_bounds("length", length, 1, MAX_REGION_BYTES)
        self.length, self._client, self._pid = length, client, os.getpid()
        ask = client._again if client._native is None else client._call
        self._native = ask(lambda native: _core.Region(native, length))
        self._array: np.ndarray | None = np.frombuffer(self._native.view, np.uint8)
        self._lock = threading.RLock()
        self._open: dict[bytes, _Open] = {}

    @property
    def array(self) -> np.ndarray:
        """Its bytes [length], writable. Raises Closed after close()."""
        if self._array is None:
            raise Closed("the region was given back")
        return self._array

    @property
    def memory(self) -> memoryview:
        """The same as a memoryview. Raises Closed after close()."""
        return memoryview(self.array)

    def register(
        self,
        keys: Sequence[bytes],
        layout_id: int,
        buffers: Any,
        axes: Sequence[str] = AXES,
        layer_index: int = 0,
        token_counts: Sequence[int] | None = None,
        priority: int = 35,
        ttl_s: float | None = None,
        in_place: bool = False,
    ) -> list[Registered]:
        """Publishes a block for each key, from where its buffers lie in the region.

        in_place: a block with all its layers, whose buffers lie as buffers_at() says, is sealed there. Then
        block_bytes() from its first buffer on are the block's, and what stands between and behind the buffers
        is written here. Or they lie apart, and they and its layers are whole pages of 4096 bytes. Nothing is
        to be written until give_back() answers "taken". Others are copied.

        buffers: integers [keys, …, 2], an (offset, size) for each place of three axes whose order `axes`
        says: of [layers, 2, 1] with ("layer", "kv", "part") buffers[k, 3, 1, 0] is the V of key k's layer
        layer_index + 3. A layer's bytes are its buffers in the order kv, part. Offsets are multiples of 64;
        the buffers of one block must not overlap. Fewer layers than the layout's leave the block open
        until the others were registered; followers see them in order. Raises InvalidArgument for arguments
        of no shape, Closed, and what create raises where nothing was sealed in place before.
        """
        self._check_process()
        names = [bytes(key) for key in keys]
        places = in_order(buffers, axes, len(names))
        with self._lock:
            geometry = self._client._geometry(layout_id)
            counts = counts_of(token_counts, geometry, len(names))
            layers = range(layer_index, layer_index + places.shape[1])
            check_bounds("layer_index", layer_index, 0, geometry.num_layers - 1)
            check_bounds("the layers' end", layers.stop, 1, geometry.num_layers)
            first = {name: i for i, name in reversed(list(enumerate(names)))}
            refusals = [
                self._refusal(place, geometry, layers, tokens, name, layout_id)
                if first[name] == i
                else "the key is twice in this call"
                for i, (place, tokens, name) in enumerate(zip(places, counts, names, strict=True))
            ]
            said = [Registered("refused", reason) if reason else None for reason in refusals]
            copied = (
                self._seal_here(names, places, counts, layout_id, layers, said, priority, ttl_s)
                if in_place
                else {}
            )
            self._claim(names, counts, layout_id, said, priority, ttl_s)
            whole = [
                name
                for i, name in enumerate(names)
                if said[i] is None and self._copy_in(i, name, places, layers, said)
            ]
            sealed = self._seal(whole)
            done = [
                known or sealed.get(name) or Registered("open")
                for known, name in zip(said, names, strict=True)
            ]
            return [item._replace(reason=item.reason or copied.get(i, "")) for i, item in enumerate(done)]

    def _claim(
        self, names: list[bytes], counts: list[int], layout_id: int, said: list[Registered | None],
        priority: int, ttl_s: float | None,
    ) -> None:  # fmt: skip
        """Memory of their own for those that are to be copied and have none yet."""
        fresh = [i for i, name in enumerate(names) if said[i] is None and name not in self._open]
        if not fresh:
            return
        layers = self._client._geometry(layout_id).num_layers
        try:
            writer = self._client.create(
                [names[i] for i in fresh], layout_id, priority, ttl_s, [counts[i] for i in fresh]
            )
        except KVClientError as error:
            if not any(item is not None and item.in_place for item in said):
                raise
            for i in fresh:  # what was sealed in place must be told
                said[i] = Registered("unavailable", str(error))
            return
        for at, (i, word) in enumerate(zip(fresh, writer.results, strict=True)):
            if word == "granted":
                self._open[names[i]] = _Open(writer, at, layout_id, counts[i], layers, set())
            else:
                said[i] = Registered(word)

    def _seal_here(
        self, names: list[bytes], places: np.ndarray, counts: list[int], layout_id: int, layers: range,
        said: list[Registered | None], priority: int, ttl_s: float | None,
    ) -> dict[int, str]:  # fmt: skip
        """Seals what can be, fills `said`, and says of the others why they are copied."""
        geometry, (attachment, moved) = self._client._geometry(layout_id), self._client._ids
        why, which = {}, {}  # the latter with their pieces
        for i, name in enumerate(names):
            if said[i] is not None:
                continue
            if len(layers) < geometry.num_layers or name in self._open:
                why[i] = "only some of its layers were given"
            elif attachment != self._native.attachment:
                why[i] = "the daemon is another one since the region was made"
            elif isinstance(lies := where_it_lies(places[i], geometry, counts[i], self.length), str):
                why[i] = lies
            else:
                which[i] = lies
        try:
            words = self._native.seal(
                moved.get(layout_id, layout_id), [names[i] for i in which],
                [int(places[i, 0, 0, 0, 0]) for i in which], [counts[i] for i in which],
                list(which.values()), priority, whole_seconds(ttl_s),
            )  # fmt: skip
        except (LayoutLost, Unavailable, Detached) as error:
            return why | dict.fromkeys(which, str(error))
        for i, word in zip(which, words, strict=True):
            if word == "no_space":
                why[i] = NOT_HERE
            else:
                said[i] = Registered(word, UNKNOWN * (word == "lost"), in_place=word in ("sealed", "lost"))
        return why

    def block_bytes(self, layout_id: int, tokens: int | None = None) -> int:
        """What a block takes that is sealed in place: a multiple of 4096."""
        geometry = self._client._geometry(layout_id)
        return geometry.length(geometry.block_tokens if tokens is None else tokens)

    def buffers_at(
        self, layout_id: int, offsets: Sequence[int], tokens: int | None = None, parts: int = 1
    ) -> np.ndarray:
        """[offsets, layers, kv, parts, 2], where the buffers of blocks lie that can be sealed in place.

        offsets: where each block begins, multiples of 4096, block_bytes() apart at least. Each layer is
        divided evenly. Raises InvalidArgument if it cannot be.
        """
        geometry = self._client._geometry(layout_id)
        count = geometry.block_tokens if tokens is None else tokens
        check_bounds("tokens", count, 1, geometry.block_tokens)
        check_bounds("parts", parts, 1, MAX_PARTS)
        out = np.zeros((len(offsets), geometry.num_layers, geometry.kv_per_layer, parts, 2), np.int64)
        for layer in range(geometry.num_layers):
            size, rest = divmod(geometry.layer_length(layer, count), geometry.kv_per_layer * parts)
            if rest or (size % ALIGNMENT and geometry.kv_per_layer * parts > 1):
                raise InvalidArgument(
                    f"layer {layer} of {geometry.layer_length(layer, count)} bytes cannot be divided into "
                    f"{geometry.kv_per_layer * parts} buffers that begin on multiples of {ALIGNMENT}"
                )
            steps = np.arange(geometry.kv_per_layer * parts).reshape(geometry.kv_per_layer, parts) * size
            out[:, layer, :, :, 0] = geometry.layer_offset(layer, count) + steps
            out[:, layer, :, :, 1] = size
        out[..., 0] += np.asarray(offsets, np.int64).reshape(-1, 1, 1, 1)
        return out

    def load(
        self, blocks: Any, buffers: Any, axes: Sequence[str] = AXES, layer_index: int = 0
    ) -> list[Loaded]:
        """Copies layers of what a get() pinned out to where `buffers` says, and compares their checksums.

        blocks: what get() answered, followed ones too: of these what is there, Blocks.wait_layer() waits.
        buffers, axes, layer_index: as for register(), one row for each block. Memory that is sealed, and what
        another block of this call went to, is refused. A corrupt block leaves the index by get(verify=True).
        Raises InvalidArgument for arguments of no shape, Closed, PinsExhausted (nothing was written).
        """
        self._check_process()
        places = in_order(buffers, axes, len(blocks))
        _, layers, kv, parts, _ = places.shape
        check_bounds("layer_index", layer_index, 0, 2**31)
        with self._lock:
            _ = self.array
            if not isinstance(blocks, _core.Blocks):  # what there is without a store
                return [Loaded("missing")] * len(blocks)
            flat = np.ascontiguousarray(places).view(np.uint64).reshape(-1)
            said = self._native.load(blocks, layer_index, flat, layers, kv * parts)
        return [Loaded(word, reason) for word, reason in said]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgument(f"the region is of process {self._pid}, this is {os.getpid()}")

    def give_back(self, keys: Sequence[bytes]) -> list[str]:
        """Takes blocks that were sealed in place out of the store, one by one, and says of each: "taken", its
        memory is the allocator's; "held", somebody reads it, so ask again later; "gone", it was not sealed
        here, or the store has evicted it: that memory is no part of the region any more. Raises Closed.
        Raises Unavailable without a daemon, InvalidArgument in a forked child.
        """
        _ = self.array
        self._check_process()
        try:
            return list(self._native.give_back([bytes(key) for key in keys]))
        except (Unavailable, Detached) as error:
            raise Unavailable(f"no daemon takes them out: {error}") from None

    def is_sealed(self, offset: int, length: int) -> bool:
        """Whether a byte of it is of a block that was sealed in place and not given back."""
        return bool(self._native.is_sealed(offset, length))

    def _refusal(
        self, place: np.ndarray, geometry: Geometry, layers: range, tokens: int, name: bytes, layout_id: int
    ) -> str:
        """Why this item cannot be; "" if it can."""
        offsets, sizes = place[..., 0].ravel(), place[..., 1].ravel()
        if (sizes < 1).any() or (sizes > self.length).any():
            return f"a buffer of {int(sizes.min())} to {int(sizes.max())} bytes in a region of {self.length}"
        if (offsets < 0).any() or (offsets > self.length - sizes).any():
            at = int(np.argmax((offsets < 0) | (offsets > self.length - sizes)))
            return f"{int(sizes[at])} bytes at {int(offsets[at])} are not inside the region of {self.length}"
        if (offsets % ALIGNMENT).any():
            return f"offset {int(offsets[np.argmax(offsets % ALIGNMENT != 0)])} is no multiple of {ALIGNMENT}"
        order = np.argsort(offsets, kind="stable")
        if (offsets[order][:-1] + sizes[order][:-1] > offsets[order][1:]).any():
            return "two buffers of the block overlap"
        if (begun := self._open.get(name)) is not None:
            if (begun.layout_id, begun.tokens) != (layout_id, tokens):
                return "its other layers were registered with another layout or token count"
            if twice := sorted(begun.seen.intersection(layers)):
                return f"layer {twice[0]} was registered before"
        for at, layer in enumerate(layers):
            have, want = int(place[at, ..., 1].sum()), geometry.layer_length(layer, tokens)
            if have != want:
                return f"layer {layer}: {have} bytes in its buffers, {want} in the layout"
        return ""

    def _copy_in(
        self, i: int, name: bytes, places: np.ndarray, layers: range, said: list[Registered | None]
    ) -> bool:
        """Copies the item's buffers into its block. True: all layers of it are there."""
        begun = self._open[name]
        try:
            block = begun.writer[begun.index]
            for layer, place in zip(layers, places[i], strict=True):
                target, done = block.layer(layer).reshape(-1).view(np.uint8), 0
                for offset, size in place.reshape(-1, 2).tolist():
                    target[done : done + size] = self.array[offset : offset + size]
                    done += size
                begun.seen.add(layer)
            while begun.marked in begun.seen:
                block.mark_layer(begun.marked)
                begun.marked += 1
        except (BlockLost, Closed, Unavailable) as error:
            self._drop(name)
            said[i] = Registered("lost", str(error))
            return False
        return len(begun.seen) == begun.layers

    def _seal(self, names: list[bytes]) -> dict[bytes, Registered]:
        """In one message for each create of before, where nothing else of it is open."""
        said: dict[bytes, Registered] = {}
        for writer in {id(self._open[name].writer): self._open[name].writer for name in names}.values():
            mine = [name for name in names if self._open[name].writer is writer]
            alone = sum(begun.writer is writer for begun in self._open.values()) == len(mine)
            for part in [mine] if alone else [[name] for name in mine]:
                try:
                    done = writer.seal(None if alone else self._open[part[0]].index) is not False
                    word = Registered("sealed" if done else "lost")
                except (BlockLost, Closed, Unavailable) as error:
                    word = Registered("lost", str(error))
                for name in part:
                    del self._open[name]
                    said[name] = word
        return said

    def _drop(self, name: bytes) -> None:
        begun = self._open.pop(name)
        with contextlib.suppress(KVClientError):
            begun.writer.abort(begun.index)

    def forget(self, keys: Sequence[bytes]) -> int:
        """Gives up blocks whose layers are not all there, and says how many."""
        with self._lock:
            known = [bytes(key) for key in keys if bytes(key) in self._open]
            for name in known:
                self._drop(name)
            return len(known)

    def close(self) -> None:
        """Gives the memory back, and what is open up. Sealed blocks stay, and are evicted as any others.
        Idempotent. Whoever still has an array of the region promises to write to it no more, and whoever
        registered it with a device that no device does."""
        with self._lock:
            if self._array is None:
                return
            self.forget(list(self._open))
            self._array = None
            self._native.close()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
