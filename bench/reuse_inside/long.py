"""What takes longer than a prompt: 500 queries on a store too small for their documents, a conversation
of more tokens than the model has positions, multiple choice, codecs, what rounding does, and looking in vain.

    python -m bench.reuse_inside --case queries --case far --case choice --case codecs --case rounding
    python -m bench.reuse_inside --case search

Owns these cases; the model, the texts and the daemon are bench.reuse_inside's. Never compares times of
different runs.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

import numpy as np

from bench.reuse_ttft import daemon

QUERIES, DOCUMENTS, DOCUMENT_TOKENS = 500, 30, 96
BLOCK_TOKENS = 32  # a document holds a whole block wherever it is cut, if it has two less one token
SAMPLED = 5  # every so many queries plain generate() is asked too
STORE_MIB = 80  # 1,800 tokens; all documents have 2,880
FAR_TOKENS, FAR_TURN, FAR_POSITIONS, FAR_SEEN = 20_000, 4_000, 16, 7_680
STORED, STORED_AT_ONCE, ASKED = 16_000, 1_000, 8_000  # blocks; tokens of a prompt
STRETCH = 256  # tokens of a prompt fed at once
ITEMS, CHOICES, CHOICE_TOKENS, PASSAGE = 12, 4, 16, 480


def queries(subject: Any) -> Iterator[dict[str, Any]]:
    """Two documents in an order nobody asked for before, behind a preamble of its own length."""
    import kvclient

    chance = random.Random(1)
    whole = [token for text in (*subject.texts, subject.code) for token in text]
    step = len(whole) // DOCUMENTS
    documents = [whole[i * step : i * step + DOCUMENT_TOKENS] for i in range(DOCUMENTS)]
    weights = [1 / (rank + 1) for rank in range(DOCUMENTS)]
    hundreds = range(QUERIES // 100)
    ratios: list[list[float]] = [[] for _ in hundreds]
    found: list[list[float]] = [[] for _ in hundreds]
    theirs: list[list[float]] = [[] for _ in hundreds]
    store, boosted = subject.client, subject.boosted
    if boosted is not None:
        boosted.fresh(STORE_MIB << 20, chunk_size=BLOCK_TOKENS)
    with daemon(f"{STORE_MIB}MiB") as home, kvclient.connect(dir=home) as client:
        subject.client = client
        subject.reattach("queries", block_tokens=BLOCK_TOKENS)
        for number in range(QUERIES):
            first, second = chance.choices(documents, weights, k=2)
            at = chance.randrange(len(whole) - 100)
            ids = whole[at : at + chance.randrange(10, 40)] + first + second + whole[at + 50 : at + 70]
            _, own_s = subject.generate(ids)
            report = subject.kv.last
            found[number // 100].append((report.approximate_tokens + report.reused_tokens) / len(ids))
            boosted_s = 0.0
            if boosted is not None:
                with subject.without(subject.model):
                    boosted_s = boosted.first(ids, keep=True)[2]
            if number % SAMPLED == 0:
                plain_s = subject.generate(ids, plain=True)[1]
                ratios[number // 100].append(plain_s / own_s)
                if boosted_s:
                    theirs[number // 100].append(plain_s / boosted_s)
        evictions = client.stats()["evictions"]
        subject.client = store
        subject.reattach("after queries")
    gains = [mean(each) for each in ratios]
    row = {
        "case": f"{QUERIES} queries, {STORE_MIB} MiB", "last_to_first": gains[-1] / gains[0],
        "last_to_best": gains[-1] / max(gains), "gain_of_hundreds": " ".join(f"{gain:.2f}" for gain in gains),
        "found_of_hundreds": " ".join(f"{mean(each):.2f}" for each in found), "evictions": evictions,
    }  # fmt: skip
    yield row | ({"kvboost": " ".join(f"{mean(each):.2f}" for each in theirs)} if boosted is not None else {})


def far(subject: Any) -> Iterator[dict[str, Any]]:
    """A text of 20,000 tokens in a window of 512 + 2,048. There is no cold run of more tokens than the model
    has positions: behind those, it is one of the last 7,680 tokens.
    """
    from kvclient.hf.engine.window import Window, WindowCache

    torch = subject.torch
    text = [token for tokens in (*subject.texts, subject.code) for token in tokens]
    text = (text * (FAR_TOKENS // len(text) + 1))[:FAR_TOKENS]
    cache = WindowCache(subject.model, Window(recent=512, older=2048))
    fed = 0
    for stop in range(FAR_TURN, FAR_TOKENS + 1, FAR_TURN):
        cut = stop - FAR_POSITIONS
        said = [cache.feed(text[fed:cut])]
        said += [cache.feed([token]) for token in text[cut : stop - 1]]
        fed = stop - 1
        seen = text[max(0, fed - FAR_SEEN) : fed]
        with torch.no_grad(), subject.without(subject.model):
            cold = subject.model(torch.tensor([seen]), logits_to_keep=FAR_POSITIONS).logits[0].log_softmax(-1)
        scores = torch.stack(said).log_softmax(-1)
        held = cache.held
        yield {
            "case": f"conversation at {stop} tokens",
            "kl": float((cold.exp() * (cold - scores)).sum(-1).mean()),
            "same_top1": float((cold.argmax(-1) == scores.argmax(-1)).float().mean()),
            "kib": held.bytes >> 10, "dropped": held.dropped_tokens,
        }  # fmt: skip


def choice(subject: Any) -> Iterator[dict[str, Any]]:
    """Which of four pieces of a text follows a passage of it, by their likelihood."""
    chance, torch = random.Random(2), subject.torch
    texts = [*subject.texts, subject.code]
    right: dict[str, list[bool]] = {"0 %": [], "50 %": [], "95 %": []}
    like_cold: dict[str, list[bool]] = {"50 %": [], "95 %": []}
    for number in range(ITEMS):
        text = texts[number % len(texts)]
        at = chance.randrange(0, len(text) - PASSAGE - 200)
        passage, behind = text[at : at + PASSAGE], at + PASSAGE
        pieces = [text[behind : behind + CHOICE_TOKENS]]
        while len(pieces) < CHOICES:
            other = chance.randrange(0, len(text) - CHOICE_TOKENS)
            if abs(other - behind) > 4 * CHOICE_TOKENS:
                pieces.append(text[other : other + CHOICE_TOKENS])
        prompt = texts[(number + 1) % len(texts)][:24] + passage
        chosen = {}
        for share, stored in (("0 %", 0), ("50 %", PASSAGE // 2), ("95 %", PASSAGE)):
            subject.reattach(f"choice {number} {share}")
            if stored:
                subject.generate(texts[(number + 2) % len(texts)][30:70] + passage[:stored])
            out, _ = subject.generate(prompt, plain=not stored)
            scores = []
            for piece in pieces:
                cache = copy.deepcopy(out.past_key_values)
                with torch.no_grad():
                    logits = subject.model(torch.tensor([piece[:-1]]), past_key_values=cache).logits[0]
                said = torch.cat([out.logits[0].reshape(1, -1), logits]).float().log_softmax(-1)
                scores.append(float(said.gather(1, torch.tensor(piece)[:, None]).mean()))
            chosen[share] = scores.index(max(scores))
            right[share].append(chosen[share] == 0)
        for share in like_cold:
            like_cold[share].append(chosen[share] == chosen["0 %"])
    for share, hits in right.items():
        row = {"case": f"multiple choice, {share} reused", "accuracy": mean(hits), "of": len(hits)}
        yield row | ({"as_cold": mean(like_cold[share])} if share in like_cold else {})


def search(subject: Any) -> Iterator[dict[str, Any]]:
    """What it costs to look for a prompt of which nothing is stored, in a table of so many blocks."""
    import kvclient
    from kvclient.blocks import plan

    chance, identity, client = random.Random(2), bytes(32), subject.client
    layout = client.register_layout(kvclient.Layout(1, 1, 1, "uint8", 128))
    before = client.stats()["blocks"]
    for _ in range(0, STORED, STORED_AT_ONCE):
        tokens = [chance.randrange(1 << 16) for _ in range(128 * STORED_AT_ONCE)]
        with client.create(kvclient.chain(identity, tokens), layout) as writer:
            writer.seal(zero_rest=True)
    times = []
    for _ in range(20):
        asked = np.array([chance.randrange(1 << 16, 1 << 17) for _ in range(ASKED)], np.int32)
        began = time.process_time()
        with plan(client, identity, asked) as segments:
            found = segments.tokens("approximate")
        times.append(time.process_time() - began)
    yield {
        "case": "search", "blocks": client.stats()["blocks"] - before, "found": found,
        "ns_a_token": median(times) / ASKED * 1e9,
    }  # fmt: skip


def rounding(subject: Any) -> Iterator[dict[str, Any]]:
    """What rounding alone does to the rows of one document: the same weights computed in fp32, and cold runs
    that were fed the prompt in stretches or had transformers' eager attention.
    """
    torch, text, licence, other = subject.torch, subject.texts[0], subject.texts[3], subject.texts[2]
    body, behind = text[300:1300], text[1300:1384]
    question, following = behind[:20], behind[20:]
    whole = copy.deepcopy(subject.model).float()
    for name, source in (("in context", licence[:40] + body + licence[100:160]), ("alone", body)):
        subject.fresh()
        subject.store(source)
        rows = []
        for shift in (1, 37, 64, 127):
            ids = other[50 : 50 + shift] + body + question
            with torch.no_grad(), subject.without(whole):
                logits = whole(torch.tensor([ids + following[:-1]])).logits[0, len(ids) - 1 :]
            ways = {"cold": True, "stretches": True, "eager": True, "reused": False}
            said = {"fp32": logits.log_softmax(-1)}
            for way, plain in ways.items():
                options = {"prefill_chunk_size": STRETCH} if way == "stretches" else {}
                eager = _eager(subject.model) if way == "eager" else contextlib.nullcontext()
                with subject.kv.bypass(read=False), eager:
                    out, _ = subject.generate(ids, plain, **options)
                    said[way] = subject.said(out.logits[0], out.past_key_values, following, plain)
            pairs = [("fp32", way) for way in ways] + [("cold", way) for way in ways if way != "cold"]
            rows.append({f"kl_{a}_{b}": subject.far(said[a], said[b]) for a, b in pairs})
        yield {"case": f"rounding, {name}"} | {key: mean(row[key] for row in rows) for key in rows[0]}


@contextlib.contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Within it, plain generate() has that attention."""
    from kvclient.hf.attention.switch import PLACE

    before = model.__dict__[PLACE]
    model.__dict__[PLACE] = dict.fromkeys(before, "eager")
    try:
        yield
    finally:
        model.__dict__[PLACE] = before


def codecs(subject: Any) -> Iterator[dict[str, Any]]:
    """A prefix of 512 tokens of three texts, reused quantised; with and without its last block in full."""
    from kvclient.blocks.codec import Kivi

    for codec in (Kivi(8, 32), Kivi(8, 128), Kivi(4, 32), Kivi(4, 128)):
        kls: dict[str, list[float]] = {"kl": [], "kl_without_last": []}
        for text in subject.texts[:3]:
            prompt, behind = text[1000:1532], text[1532:1596]
            subject.reattach(f"codec {codec}", codec=codec)
            cold, _ = subject.generate(prompt, plain=True)
            said = subject.said(cold.logits[0], cold.past_key_values, behind, plain=True)
            subject.generate(prompt)
            for name in kls:
                with subject.kv.bypass(read=False):
                    out, _ = subject.generate(prompt)
                scores = subject.said(out.logits[0], out.past_key_values, behind)
                kls[name].append(float((said.exp() * (said - scores)).sum(-1).mean()))
                last = subject.kv._model_state.served.sinks.last
                subject.client.delete(subject.kv.chunker.chain(last.identity, prompt)[3:])
        bytes_ratio = codec.bytes_per_token(3, 64) / (2 * 3 * 64 * 2)
        yield {
            "case": f"int{codec.bits}, groups of {codec.group}", "bytes_to_bf16": bytes_ratio,
            "full_tokens": subject.kv.stats["full_tokens"], **{name: mean(kl) for name, kl in kls.items()},
        }  # fmt: skip
    subject.reattach("after codecs")
