"""Swapped documents: what any choice of tokens could reach, and where in the cache the error is.

    python -m bench.reuse_inside --case oracle

Owns a forward pass of its own over the model's modules (Llama's), in which K and V of each column may be
those of a cold run, stored ones moved to their place, or computed here beside those. The oracle's tokens are
chosen by gradient on every second position of the continuation, which no repair can know, and measured on the
other positions too. Measures KL only; what a share of tokens costs is bench.reuse_inside's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

from bench.reuse_inside.swapped import PAIRS, POSITIONS, QUESTION, parts_of, texts_of

SIZE = 600
SHARE = 0.24  # of the reused tokens: what 0.30 x HF has room for, if choosing costs nothing
STORED_AT = 40  # where the last document stood
RECENCY = 16
STEPS, RATE, MOMENTUM = 8, 1.5, 0.5
FITTED, HELD = slice(0, None, 2), slice(1, None, 2)  # positions of the continuation
SHARPEST = 0.15  # of the soft choice, at the last step
UPPER = 10  # the first of the upper two thirds of the layers


class Pass:
    """One prompt and its continuation: what is stored of it, and what a cold run has."""

    def __init__(self, subject: Any, texts: dict[str, list[int]], pair: tuple[Any, ...]) -> None:
        self.torch = subject.torch
        source, before, second, first, behind = parts_of(texts, SIZE, *pair)
        live = behind[: QUESTION + POSITIONS - 1]
        self.model = subject.model.model
        self.head = subject.model.lm_head
        ids = before + second + first + live
        start = len(before)
        self.first, self.last = (start, start + SIZE), (start + SIZE, start + 2 * SIZE)
        self.length, self.said_from = len(ids), self.last[1] + QUESTION - 1
        kept: list[Any] = []
        self._run(source, lambda _, kv: kept.append(kv) or kv)
        self.stale, self.true = [], []
        self.cold = self._run(ids, lambda _, kv: self.true.append(kv) or kv)
        for kv, true in zip(kept, self.true, strict=True):
            moved = true.clone()
            moved[..., slice(*self.last), :] = kv[..., STORED_AT : STORED_AT + SIZE, :]
            moved[..., slice(*self.first), :] = kv[..., STORED_AT + SIZE : STORED_AT + 2 * SIZE, :]
            self.stale.append(moved)
        self.ids = ids

    def _run(self, ids: list[int], mix: Callable[[int, Any], Any]) -> Any:
        """Log-probabilities from `said_from` on. mix: K (not yet turned) and V [2, heads, rows, dim] of a
        layer as computed, to those that are attended to.
        """
        torch, F = self.torch, self.torch.nn.functional
        rows = len(ids)
        hidden = self.model.embed_tokens(torch.tensor([ids]))
        cos, sin = self.model.rotary_emb(hidden, torch.arange(rows)[None])
        for index, layer in enumerate(self.model.layers):
            attention = layer.self_attn
            x = layer.input_layernorm(hidden)
            q, k, v = (
                project(x).view(rows, -1, attention.head_dim).transpose(0, 1)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            k, v = mix(index, torch.stack([k, v]))
            half = attention.head_dim // 2
            q, k = (a * cos[0] + torch.cat([-a[..., half:], a[..., :half]], -1) * sin[0] for a in (q, k))
            k, v = (a.repeat_interleave(len(q) // len(a), 0) for a in (k, v))  # else torch's slow path
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
            hidden = hidden + attention.o_proj(out[0].transpose(0, 1).reshape(1, rows, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.head(self.model.norm(hidden[0, getattr(self, "said_from", rows) :])).log_softmax(-1)

    def far(self, mix: Callable[[int, Any], Any]) -> Any:
        """KL at each position of the continuation."""
        scores = self._run(self.ids, mix)
        return (self.cold.exp() * (self.cold - scores)).sum(-1)

    def weights(self, chosen: Any) -> Any:
        """1 for live columns, `chosen` for the reused ones."""
        ones = self.torch.ones(self.length)
        return self.torch.cat([ones[: self.first[0]], chosen, ones[self.last[1] :]])

    def recomputed(self, chosen: Any) -> Any:
        """KL with those tokens computed here, beside stored ones."""
        weights = self.weights(chosen)[:, None]
        return self.far(lambda i, kv: self.stale[i] + weights * (kv - self.stale[i]))

    def put_in(self, chosen: Any) -> Any:
        """KL with K and V of a cold run. chosen: weights that broadcast to [layers, 2, heads, reused]."""
        torch, reused = self.torch, slice(self.first[0], self.last[1])
        chosen = chosen.expand(len(self.stale), *self.stale[0].shape[:2], 2 * SIZE)

        def mix(index: int, kv: Any) -> Any:
            stale, true = (each[index][..., reused, :] for each in (self.stale, self.true))
            mixed = stale + chosen[index][..., None] * (true - stale)
            return torch.cat([kv[..., : self.first[0], :], mixed, kv[..., self.last[1] :, :]], -2)

        return self.far(mix)


def best(torch: Any, far: Callable[[Any], Any], count: int) -> tuple[Any, Any]:
    """(`count` reused tokens, KL with them): a soft choice follows the gradient of the KL at the fitted
    positions and hardens; of the last steps that with the least KL there.
    """
    total = 2 * SIZE
    score, speed, found = torch.zeros(total), torch.zeros(total), []
    always = torch.zeros(total)
    always[-RECENCY:] = 1
    for step in range(STEPS + 1):
        with torch.no_grad():
            hard = torch.zeros(total)
            hard[(score + 1e9 * always).topk(count).indices] = 1
            if step > STEPS // 2:
                found.append((hard, far(hard)))
            if step == STEPS:
                break
            sharp = SHARPEST ** (step / (STEPS - 1))
            low, high = score.min() - 9 * sharp, score.max() + 9 * sharp
            for _ in range(40):
                middle = (low + high) / 2
                more = torch.sigmoid((score - middle) / sharp)[:-RECENCY].sum() > count - RECENCY
                low, high = (middle, high) if more else (low, middle)
        raised = score.clone().requires_grad_()
        far(torch.maximum(torch.sigmoid((raised - low) / sharp), always))[FITTED].mean().backward()
        gradient = raised.grad[:-RECENCY]
        speed[:-RECENCY] = MOMENTUM * speed[:-RECENCY] - gradient / gradient.pow(2).mean().sqrt()
        score = score + RATE * sharp * speed
    return min(found, key=lambda result: float(result[1][FITTED].mean()))


def oracle(subject: Any) -> Iterator[dict[str, Any]]:
    """Per pair and in the mean: KL with parts of the cache put right, and with tokens chosen in hindsight."""
    torch = subject.torch
    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)
    texts, every = texts_of(subject), []
    for pair in PAIRS:
        with torch.no_grad(), subject.without(subject.model):
            parts = Pass(subject, texts, pair)
            row = _parts(parts)
        chosen, kl = best(torch, parts.recomputed, round(SHARE * 2 * SIZE))
        row |= {"chosen, fitted": float(kl[FITTED].mean()), "chosen, others": float(kl[HELD].mean())}
        row["chosen in the last"] = float(chosen[SIZE:].mean())
        every.append(row)
        yield {"case": f"oracle: {pair[2]}, {pair[0]}", **row}
    means = {name: mean(row[name] for row in every) for name in every[0]}
    yield {"case": f"oracle: {len(PAIRS)} pairs", **means}


def _parts(parts: Pass) -> dict[str, float]:
    torch, total, layers = parts.torch, 2 * SIZE, len(parts.stale)
    heads = parts.stale[0].shape[1]
    last = torch.zeros(total)
    last[SIZE:] = 1

    def of(*at: Any) -> Any:
        """The last document, in this part of [layers, 2, heads] only."""
        part = torch.zeros(layers, 2, heads, 1)
        part[at] = 1
        return part * last

    every = slice(None)
    chosen = {
        "stored": last * 0, "first document": 1 - last, "last document": last,
        "last, K": of(every, 0), "last, V": of(every, 1),
        "last, lower layers": of(slice(UPPER)), "last, upper layers": of(slice(UPPER, None)),
    } | {f"last, head {head}": of(every, every, head) for head in range(heads)}  # fmt: skip
    evenly = torch.zeros(total)
    evenly[:: round(1 / SHARE)] = 1
    rows = {name: float(parts.put_in(weights).mean()) for name, weights in chosen.items()}
    again = {"evenly recomputed": evenly, "last document recomputed": last}
    return rows | {name: float(parts.recomputed(weights).mean()) for name, weights in again.items()}
