"""What a generate() call asks for, as rows of tokens; or why the store stays out of it.

Owns the reading of transformers' arguments. Never talks to the store. Invariant: a Prompt describes rows
whose tokens stand at positions 0..n-1 behind left padding and are attended to causally; whatever is not
certainly that is a reason (a short stable word for counting) and the call runs as if the store were not
there.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvclient.errors import KVClientError, PagesExhausted
from kvclient.hf.release import DUMMIES, INDEXED, NAMES, STATES, compresses

# Arguments of the model that leave the KV of the prompt's tokens alone. Any other that is set means that the
# tokens are not all the model sees (images, token types, adapters' own arguments, …).
HARMLESS = frozenset(
    {
        "attention_mask",
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        *NAMES,
        "position_ids",
        "return_dict",
        "tokenizer",  # of stop strings and token healing: generate() leaves it there
        "assistant_tokenizer",
        "use_cache",
    }
)

# Layers of a cache that the store's take the place of…
REPLACED = (DynamicLayer, DynamicSlidingWindowLayer, *INDEXED)
BESIDE = (*STATES, *DUMMIES)  # …or that stay, with K and V, if any, in the store's.


class Bypassed(Exception):
    """Not an error: the store stays out of this call. `reason` is what is counted, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass
class Group:
    """Rows with the same tokens and padding: beams, samples of one prompt, repeated prompts."""

    tokens: np.ndarray  # int32, without the padding
    pad: int
    rows: list[int] = field(default_factory=list)


@dataclass
class Prompt:
    groups: list[Group]
    rows: int
    length: int  # columns, padding included

    @property
    def tokens(self) -> int:
        """Prompt tokens of all rows."""
        return sum(len(group.tokens) * len(group.rows) for group in self.groups)

    @property
    def pads(self) -> list[int]:
        """Of each row, the columns of padding at its left."""
        return [pad for _, pad in sorted((row, group.pad) for group in self.groups for row in group.rows)]

    def check(self, config: Any, states: bool, padded: bool, most_tokens: int = 0) -> None:
        """Raises Bypassed where a model is not served with such rows or such a call. states: it has recurrent
        layers. padded: the self-test found rows with padding right. most_tokens: it is served up to this
        length only; 0: up to any.
        """
        if most_tokens and not (isinstance(config.max_length, int) and config.max_length <= most_tokens):
            what = f"max_length={config.max_length} of {most_tokens}, behind which its cache drops tokens"
            raise Bypassed("window", what)
        if (states or not padded) and any(group.pad for group in self.groups):
            why = "its recurrent layers" if states else "it is wrong, or not known to be right, with it"
            raise Bypassed("padding", why)
        if states and (config.output_attentions or config.output_hidden_states):
            raise Bypassed("prompt_outputs", "a prompt is cut where states are stored")

    def reports(self, prefix: Any, blend: Any, found: list[Any]) -> list[Row]:
        """Of each row, what came from a prefix (`columns`) and from inside (`found`, `recomputed`). found: by
        group, how many tokens came from disk."""
        columns = 0 if prefix is None else prefix.columns
        inside: Any = (0, 0) if blend is None else (blend.found, blend.recomputed, blend.estimated_kl)
        rows: list[tuple[int, Row]] = []
        for group, match in zip(self.groups, found, strict=True):
            reused = max(0, columns - group.pad)
            row_report = Row(len(group.tokens), reused, min(reused, match.disk_tokens), *inside)
            rows += [(row, row_report) for row in group.rows]
        return [row_report for _, row_report in sorted(rows, key=lambda pair: pair[0])]


def read_prompt(model: torch.nn.Module, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Prompt:
    """The rows of a call with input_ids [batch, columns], as generate() is about to prefill them. Raises
    Bypassed with the reason.
    """
    if torch.is_autocast_enabled(input_ids.device.type):
        raise Bypassed("autocast", "autocast changes the dtype the model computes in")
    made = model.__dict__.get("prepare_inputs_for_generation")
    if made is not None and getattr(made, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise Bypassed("prepare_inputs", "the model's own: peft's soft prompts stand before the tokens")
    if model_kwargs.get("inputs_embeds") is not None:
        raise Bypassed("inputs", "inputs_embeds")
    _check_cache(model_kwargs)
    for name, value in model_kwargs.items():
        nothing = value is None or value is False or (isinstance(value, dict) and not value)
        # pictures and sounds, of which there are none
        if name not in HARMLESS and not nothing:
            raise Bypassed("model_arguments", name)
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32) or not input_ids.numel():
        raise Bypassed("inputs", f"input_ids of shape {list(input_ids.shape)} and {input_ids.dtype}")
    rows, length = input_ids.shape
    pads = _padding(model_kwargs.get("attention_mask"), rows, length)
    _check_positions(model_kwargs.get("position_ids"), pads, length)
    tokens = input_ids.to("cpu", torch.int32).numpy()
    groups: dict[tuple[int, bytes], Group] = {}
    for row in range(rows):
        ids = np.ascontiguousarray(tokens[row, pads[row] :])
        key = (pads[row], ids.tobytes() if rows > 1 else b"")
        groups.setdefault(key, Group(ids, pads[row])).rows.append(row)
    return Prompt(list(groups.values()), rows, length)


def _check_cache(model_kwargs: dict[str, Any]) -> None:
    if not model_kwargs.get("use_cache", True):
        raise Bypassed("no_cache")
    # Without one transformers 5.0 leaves it to the model to make a DynamicCache.
    for name in NAMES:
        if (cache := model_kwargs.get(name)) is not None:
            _check_given(cache)


def begun(cache: Any) -> bool:
    """Whether a DynamicCache holds tokens, or the state behind some: with states alone it tells no length."""
    states = (layer.has_previous_state for layer in cache.layers if isinstance(layer, STATES))
    if any(any(kinds.values()) for kinds in states):
        return True
    return any(isinstance(layer, DynamicLayer) for layer in cache.layers) and cache.get_seq_length() > 0


def _check_given(cache: Any) -> None:
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        raise Bypassed("cache_implementation", type(cache).__name__)
    if begun(cache):
        raise Bypassed("user_cache", "not empty")
    if any(type(layer) not in (*REPLACED, *BESIDE) and not compresses(layer) for layer in cache.layers):
        raise Bypassed("cache_implementation", str({type(layer).__name__ for layer in cache.layers}))


def _padding(mask: torch.Tensor | None, rows: int, length: int) -> list[int]:
    """The number of padding tokens left of each row."""
    if mask is None:
        return [0] * rows
    if mask.ndim != 2 or tuple(mask.shape) != (rows, length):
        raise Bypassed("attention_mask", f"of shape {list(mask.shape)} for {rows} rows of {length}")
    real = mask != 0
    pads = length - real.sum(dim=1)
    if not torch.equal(real, torch.arange(length, device=mask.device) >= pads[:, None]):
        raise Bypassed("attention_mask", "not left padding")
    pads = pads.tolist()
    if max(pads) == length:
        raise Bypassed("attention_mask", "a row without tokens")
    return pads


def _check_positions(positions: torch.Tensor | None, pads: list[int], length: int) -> None:
    if positions is None:
        return
    if positions.ndim != 2 or positions.shape[-1] != length or positions.shape[0] not in (1, len(pads)):
        raise Bypassed("position_ids", f"of shape {list(positions.shape)}")
    columns = torch.arange(length, device=positions.device)
    pad = torch.tensor(pads, device=positions.device)[:, None]
    if not ((positions == columns - pad) | (columns < pad)).all():
        raise Bypassed("position_ids", "not 0 to n-1")


@dataclass(frozen=True)
class Row:
    """What was reused of one row's prompt."""

    prompt_tokens: int
    reused_tokens: int
    from_disk: int = 0  # of the reused ones
    approximate_tokens: int = 0
    recomputed_tokens: int = 0
    estimated_kl: float | None = None


@dataclass
class Report:
    """One call. Times in seconds of wall time; tokens summed over the rows of the batch. Where the store was
    left out (`bypassed` says why) only total_s is measured."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # handed over instead of computed; at most the prompt minus one
    reused_by_tier: dict[str, int] = field(default_factory=lambda: {"shm": 0, "disk": 0, "peer": 0})
    approximate_tokens: int = 0  # found inside the prompt, computed behind other tokens; not in reused_tokens
    approximate_from_disk: int = 0  # of the approximate ones: what this call had loaded
    recomputed_tokens: int = 0  # of the approximate ones: repaired in the layers behind the check
    estimated_kl: float | None = None  # of the answer, in nats, where max_kl is promised; of a batch, most
    exact: bool = True  # False: of what was computed some is approximate or rounded, and nothing to publish()
    inside_keys: bytes = field(default=b"", repr=False)  # of the blocks they came from, 32 each
    followed_tokens: int = 0  # of the reused ones: taken while another process was still computing them
    published_blocks: int = 0
    lookup_s: float = 0.0  # keys, look-up, pins, claims
    load_s: float = 0.0  # copying KV to where the model reads it
    wait_s: float = 0.0  # for another process's layers
    publish_s: float = 0.0  # copying KV into blocks, and sealing
    prefill_s: float = 0.0  # the model itself, without the above
    ttft_s: float = 0.0  # from the call of generate() to the first token, everything included
    total_s: float = 0.0
    bypassed: str | None = None  # why the store was not read or written at all: a word
    bypass_detail: str | None = None  # …and in full, where the word does not say it
    read_bypassed: str | None = None  # why it was only written
    write_bypassed: str | None = None  # why it was only read, or, "changed", only written until then
    inside_bypassed: str | None = None  # why nothing was reused inside the prompt, behind its prefix
    dense: str | None = None  # why not, or no longer, in place: the word that attention.fallbacks() counts
    followed_lost: int = 0  # writers that were followed and ended; the tokens were computed instead
    no_space: int = 0  # blocks the pool had no room for
    unavailable: int = 0  # blocks that no store was there to take (on_error="miss")
    lost_blocks: int = 0  # claimed, but not sealed: the daemon went, or the claim ended, meanwhile
    full_tokens: int = 0  # of the reused ones, with a codec: taken as computed (first and last of a prompt)
    published_full_blocks: int = 0  # those of such tokens; not in published_blocks
    published_group_blocks: int = 0  # of layers with windows, and of states; not in published_blocks
    not_quantisable: int = 0  # blocks the codec cannot hold: beyond 65504, or not finite. Not stored
    disk_refused: int = 0  # rows whose blocks on disk were not waited for: computing them was sooner
    store_error: str | None = None  # what the store failed with; from there on the call went on without it
    store_failed_s: float = 0.0  # what that took
    rows: list[Row] = field(default_factory=list)  # of a batch; empty where the store was left out

    def note_prefix(self, prefix: Any, found: list[Any]) -> None:
        """Tells what came from a prefix; found: by group, how many tokens came from where."""
        self.reused_tokens = left = prefix.tokens
        left -= (from_disk := min(left, sum(f.disk_tokens * len(f.group.rows) for f in found)))
        left -= (from_peer := min(left, sum(f.peer_tokens * len(f.group.rows) for f in found)))
        self.reused_by_tier.update(shm=left, disk=from_disk, peer=from_peer)
        self.followed_tokens, self.full_tokens = prefix.followed_tokens, prefix.full_tokens

    def of_row(self, row: int) -> Report:
        """The same with the tokens of one row."""
        if len(self.rows) < 2:
            return self
        row_of = self.rows[row]
        here = {"shm": row_of.reused_tokens - row_of.from_disk, "disk": row_of.from_disk}
        tiers = {**Report().reused_by_tier, **here}
        tokens = {name: getattr(row_of, name) for name in vars(row_of) if name != "from_disk"}
        return dataclasses.replace(self, **tokens, reused_by_tier=tiers, rows=[row_of])


class Totals:
    """Sums over calls. Thread-safe."""

    _SUMMED = (
        "prompt_tokens", "reused_tokens", "approximate_tokens", "approximate_from_disk", "recomputed_tokens",
        "followed_tokens",
        "published_blocks", "published_full_blocks", "published_group_blocks", "followed_lost", "no_space",
        "not_quantisable",
        "disk_refused", "full_tokens", "unavailable", "lost_blocks", "store_failed_s",
        "lookup_s", "load_s", "wait_s", "publish_s", "prefill_s", "ttft_s", "total_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._bypassed: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()  # reused tokens

    def add(self, report: Report) -> None:
        """One call more."""
        with self._lock:
            self._sums["requests"] += 1
            self._sums["store_errors"] += report.store_error is not None
            self._sums["hits"] += report.reused_tokens + report.approximate_tokens > 0
            for name in self._SUMMED:
                self._sums[name] += getattr(report, name)
            self._tiers.update(report.reused_by_tier)
            in_part = (report.read_bypassed, report.write_bypassed, report.inside_bypassed)
            for reason in (report.bypassed, *in_part):
                if reason is not None:
                    self._bypassed[reason] += 1

    def snapshot(self) -> dict[str, Any]:
        """Sums over all calls by name, with their hit rate and tokens by tier."""
        with self._lock:
            known = dict.fromkeys(("requests", "hits", "store_errors", *self._SUMMED), 0)
            tiers = {**Report().reused_by_tier, **self._tiers}
            sums = {**known, **self._sums}
            found = sums["reused_tokens"] + sums["approximate_tokens"]
            sums["hit_rate"] = sums["hits"] / max(1, sums["requests"])
            sums["token_hit_rate"] = found / max(1, sums["prompt_tokens"])
            return {**sums, "reused_by_tier": tiers, "bypassed": dict(self._bypassed)}


# What a step of the store fails with: its own errors, the system's, and what native code, NumPy and torch
# raise for what they cannot do. All else (AssertionError, TypeError, KeyError) is a broken invariant of ours.
FAILURES = (KVClientError, OSError, RuntimeError, ValueError, MemoryError)


class LoadFailed(KVClientError):
    """KV was to be loaded within the model's pass: its cause is what was raised, and no error of the model's.
    Internal: the request computes.
    """


def loads(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, whose failures are LoadFailed: so a model's pass knows them from its own."""

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except (LoadFailed, PagesExhausted):
            raise
        except FAILURES as error:
            raise LoadFailed(f"{type(error).__name__}: {error}") from error

    return call


class Lost(Exception):
    """A followed block will not come: its writer died, gave up or stands still. Internal: the request
    computes.
    """


@dataclass
class Clock:
    """Seconds spent where, of one request."""

    load_s: float = 0.0
    wait_s: float = 0.0
    publish_s: float = 0.0
