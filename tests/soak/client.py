"""One client of the soak: puts, reads, follows, deletes and prefetches at random, and checks every byte it is
given.

Owns nothing that outlives it: what it did is in the shared ledger. Ends only by a signal. Invariant: before
anything that could bring a key back it tells the ledger, and before anything that removes one as well.
"""

from __future__ import annotations

import gc
import os
import random
import select
import time
import traceback
from typing import Any

from kvclient import connect
from kvclient.errors import BlockLost, DeadlineExceeded, NoSpace, Unavailable
from tests.soak.truth import (
    MODELS,
    PRIVATE,
    SHARED,
    SHORT,
    TTL_S,
    Count,
    Ledger,
    Universe,
    as_words,
    block_bytes,
    is_right,
    words,
)

MAX_HELD = 6


def rest(seconds: float) -> None:
    """The pace of the trouble: no verdict depends on it."""
    select.select([], [], [], seconds)


class SoakClient:
    def __init__(self, directory: str, universe: Universe, ledger: Ledger, place: int, report: int) -> None:
        self._directory = directory
        self._universe = universe
        self._ledger = ledger
        self._place = place
        self._report = report  # a file open for appending
        self._choose = random.Random(os.urandom(16))
        self._mine = [universe.numbers(model, place) for model in range(len(MODELS))]
        self._held: list[Any] = []

    def run(self) -> None:
        while True:
            try:
                self._client = connect(self._directory)
                self._layouts = [self._client.register_layout(model.to_blob()) for model in MODELS]
                break
            except Unavailable:
                self._count(Count.unavailable)
                rest(0.02)
        acts = [self._put, self._put, self._read, self._read, self._read, self._stream, self._follow]
        acts += [self._delete, self._prefetch, self._touch, self._hold, self._let_go]
        while True:
            self._count(Count.operations)
            try:
                self._choose.choice(acts)()
            except Unavailable:
                self._count(Count.unavailable)
                rest(0.02)
            except NoSpace:
                self._count(Count.no_space)
                self._let_go()
            except (BlockLost, DeadlineExceeded):
                self._count(Count.writers_lost)
            except Exception:
                self._count(Count.unexpected)
                self._say("unexpected", traceback.format_exc())

    # ------------------------------------------------------------ what it does

    def _put(self) -> None:
        model, kind, numbers = self._some(4)
        ttl_s = TTL_S if kind == SHORT else None
        for number in numbers:
            self._ledger.may_be_found(number)
        priority = self._choose.choice([10, 35, 35, 60, 80])
        keys = [self._universe.keys[number] for number in numbers]
        writer = self._client.create(keys, self._layouts[model], priority=priority, ttl_s=ttl_s)
        try:
            for index in writer.granted:
                for layer in range(MODELS[model].num_layers):
                    self._fill(writer[index], layer)
            if self._choose.random() < 0.1:
                writer.abort()
                return
            writer.seal()
        except BaseException:
            writer.abort()
            raise
        finally:
            granted = list(writer.granted)
            del writer
        for index in granted:
            if kind == SHORT:
                self._ledger.may_be_found(numbers[index], time.time() + TTL_S + 2.5)
        self._count(Count.put_blocks, len(granted))
        self._count(Count.put_bytes, len(granted) * block_bytes(MODELS[model]))

    def _stream(self) -> None:
        """A block written slowly, layer by layer, for followers."""
        model = self._choose.randrange(1, len(MODELS))
        number = self._choose.choice(self._mine[model][SHARED][:8])
        self._ledger.may_be_found(number)
        self._client.delete([self._universe.keys[number]])
        writer = self._client.create([self._universe.keys[number]], self._layouts[model])
        try:
            for index in writer.granted:
                for layer in range(MODELS[model].num_layers):
                    self._fill(writer[index], layer)
                    writer[index].mark_layer(layer)
                    rest(self._choose.random() * 0.004)
            writer.seal()
        except BaseException:
            writer.abort()
            raise

    def _follow(self) -> None:
        model = self._choose.randrange(1, len(MODELS))
        keys = [self._universe.keys[number] for number in self._mine[model][SHARED][:8]]
        with self._client.get(keys, follow=True, wait_s=self._choose.choice([0.0, 0.05, 0.5])) as blocks:
            for block in blocks:
                if block is None:
                    continue
                for layer in range(MODELS[model].num_layers):
                    block.wait_layer(layer, timeout_s=2.0)
                    self._check(block, layer, "followed")
                    self._count(Count.layers_followed)
            block = None

    def _read(self) -> None:
        _, _, numbers = self._some(6)
        blocks = self._get(numbers)
        for block in blocks:
            if block is not None:
                self._check_all(block)
        block = None
        blocks.release()

    def _hold(self) -> None:
        """Holds what it reads for a while: nobody may change it."""
        if len(self._held) < MAX_HELD:
            _, _, numbers = self._some(2)
            self._held.append(self._get(numbers))

    def _let_go(self) -> None:
        while self._held:
            blocks = self._held.pop()
            for block in blocks:
                if block is not None:
                    self._check_all(block, "held")
            block = None
            blocks.release()
        gc.collect()

    def _delete(self) -> None:
        _, kind, numbers = self._some(3)
        for number in numbers:
            self._ledger.may_be_found(number)
        lives = self._ledger.lives()
        self._count(Count.deleted, self._client.delete([self._universe.keys[number] for number in numbers]))
        if kind != PRIVATE:  # what nobody else puts
            return
        for number in numbers:
            self._ledger.is_gone(number)
        if self._ledger.lives() != lives:  # too late: the memory of that is gone
            for number in numbers:
                self._ledger.may_be_found(number)

    def _prefetch(self) -> None:
        _, _, numbers = self._some(8)
        self._client.prefetch(
            [self._universe.keys[number] for number in numbers], self._choose.randrange(100)
        )

    def _touch(self) -> None:
        _, _, numbers = self._some(8)
        self._client.touch([self._universe.keys[number] for number in numbers])

    # ------------------------------------------------------------ checking

    def _get(self, numbers: list[int]) -> Any:
        gone = [self._ledger.should_be_gone(number) for number in numbers]
        blocks = self._client.get(
            [self._universe.keys[number] for number in numbers],
            wait_s=self._choose.choice([0.0, 0.0, 0.05, 1.0]),
            verify=self._choose.random() < 0.2,
        )
        for number, was_gone, block in zip(numbers, gone, blocks, strict=True):
            self._count(Count.misses if block is None else Count.hits)
            if block is not None and was_gone and self._ledger.should_be_gone(number):
                self._count(Count.came_back)
                kind = ["shared", "private", "short"][self._universe.kind[number]]
                self._say("came back", f"{kind} key {number}, {block.key.hex()}")
        return blocks

    def _check_all(self, block: Any, when: str = "read") -> None:
        model = MODELS[self._universe.model[self._universe.number[block.key]]]
        for layer in range(model.num_layers):
            self._check(block, layer, when)
        self._count(Count.hit_bytes, block_bytes(model))

    def _check(self, block: Any, layer: int, when: str) -> None:
        if not is_right(block.key, layer, block.layer(layer)):
            self._count(Count.wrong)
            self._say("wrong bytes", f"{when}: layer {layer} of key {block.key.hex()}")

    def _fill(self, block: Any, layer: int) -> None:
        target = as_words(block.layer(layer))
        target[:] = words(block.key, layer, len(target))

    def _some(self, most: int) -> tuple[int, int, list[int]]:
        """A model, a kind, and a few of its keys, the first ones more often."""
        model = self._choose.randrange(len(MODELS))
        kind = self._choose.choice([SHARED, SHARED, PRIVATE, SHORT])
        numbers = self._mine[model][kind]
        reach = max(most, int(len(numbers) * self._choose.random()))
        return model, kind, self._choose.sample(numbers[:reach], self._choose.randint(1, most))

    def _count(self, what: Count, by: int = 1) -> None:
        self._ledger.add(self._place, what, by)

    def _say(self, what: str, text: str) -> None:
        os.write(self._report, f"{time.strftime('%H:%M:%S')} client {self._place} {what}: {text}\n".encode())
