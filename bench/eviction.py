"""python -m bench.eviction: which share of a prompt's blocks is found, by rule of eviction; a simulation.

Five streams of requests on a pool of 1,000 blocks of one size, each from one seed: conversations that add
four blocks a turn and end, more of them at once than the pool holds, and slow ones; prompts by Zipf; prompts
whose favourites change. The rules: the least recently used goes first; uses that fade by half in an hour;
uses that also fade by half with each part of the pool that new blocks took (the store's rule, eviction.h).
"""

import argparse
import heapq
import json
import random
from collections.abc import Iterator
from pathlib import Path

Requests = Iterator[tuple[float, list]]  # seconds since the last, the prompt's blocks
POOL, HALF_LIFE_S = 1000, 3600.0


class Pool:
    def __init__(self, half_life_pools: float | None, recent_only: bool = False) -> None:
        """half_life_pools: None: time alone counts. recent_only: the last use counts, and nothing else."""
        self.half_life_pools, self.recent_only = half_life_pools, recent_only
        self.scores: dict = {}
        self.order: list = []
        self.half_lives, self.uses = 0.0, 0

    def passed(self, seconds: float, new_blocks: int) -> None:
        self.half_lives += seconds / HALF_LIFE_S
        if self.half_life_pools:
            self.half_lives += new_blocks / POOL / self.half_life_pools
        if self.half_lives > 500:
            self.half_lives -= 500
            self.scores = {block: score * 2.0**-500 for block, score in self.scores.items()}
            self.order = [(score * 2.0**-500, number, block) for score, number, block in self.order]

    def use(self, block: object, place: int) -> None:
        self.uses += 1
        value = self.uses if self.recent_only else 2.0**self.half_lives
        before = 0 if self.recent_only else self.scores.get(block, 0)
        self.scores[block] = before + value * (1 - place * 1e-9)
        heapq.heappush(self.order, (self.scores[block], self.uses, block))

    def ask(self, prompt: list) -> int:
        """How many of its first blocks are there; the others are then put."""
        found = next((i for i, block in enumerate(prompt) if block not in self.scores), len(prompt))
        for place, block in enumerate(prompt[:found]):
            self.use(block, place)
        new = [(place, block) for place, block in enumerate(prompt) if block not in self.scores]
        while len(self.scores) + len(new) > POOL:
            score, _, block = heapq.heappop(self.order)
            if self.scores.get(block) == score:
                del self.scores[block]
        self.passed(0, len(new))
        for place, block in new:
            self.use(block, place)
        return found


def conversations(
    draw: random.Random, at_once: int, turns: int, seconds: float, count: int = 12_000
) -> Requests:
    begun, talks = 0, []
    for _ in range(count):
        while len(talks) < at_once:
            talks.append([begun, 0, 1 + int(draw.expovariate(1 / turns))])
            begun += 1
        talk = draw.choice(talks)
        talk[1] += 1
        yield seconds, [("system", i) for i in range(4)] + [(talk[0], i) for i in range(4 * talk[1])]
        if talk[1] >= talk[2]:
            talks.remove(talk)


def zipf(draw: random.Random, count: int = 20_000) -> Requests:
    for prompt in draw.choices(range(2000), [(i + 1) ** -0.9 for i in range(2000)], k=count):
        yield 1.0, [(prompt, i) for i in range(8)]


def changing(draw: random.Random, count: int = 20_000) -> Requests:
    for number in range(count):
        prompt = number // 50 * 5 + int(400 * draw.random() ** 2.5)
        yield 1.0, [(prompt, i) for i in range(8)]


STREAMS = {
    "conversations": lambda draw: conversations(draw, 30, 5, 1.0),
    "too many": lambda draw: conversations(draw, 60, 8, 1.0),
    "slow": lambda draw: conversations(draw, 30, 5, 20.0),
    "Zipf": zipf,
    "changing": changing,
}
RULES = {
    "least recently used": lambda: Pool(None, recent_only=True),
    "by the hour": lambda: Pool(None),
    **{f"and by {part:g} of the pool": lambda part=part: Pool(part) for part in (1.0, 0.5, 0.25, 0.125)},
}


def share(stream: str, rule: str) -> float:
    pool, found, asked = RULES[rule](), 0, 0
    for seconds, prompt in STREAMS[stream](random.Random(1)):
        pool.passed(seconds, 0)
        found += pool.ask(prompt)
        asked += len(prompt)
    return found / asked


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.eviction", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the shares to this file")
    options = parser.parse_args()
    shares = {rule: {stream: share(stream, rule) for stream in STREAMS} for rule in RULES}
    print("| | " + " | ".join(STREAMS) + " |\n|" + "---|" * (1 + len(STREAMS)))
    for rule, found in shares.items():
        print(f"| {rule} | " + " | ".join(f"{part:.2f}" for part in found.values()) + " |")
    if options.json:
        options.json.write_text(json.dumps(shares) + "\n")


if __name__ == "__main__":
    main()
