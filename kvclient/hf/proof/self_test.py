"""The self-test: proof on a few tokens that this model gives the same answers with the store as without.

Owns the comparisons and their tolerances. Never touches the user's store (it uses the in-memory fake), the
random number generators or the model's state. Invariant: it runs the very code that attach() installs; a
model of the same class, code and numbers as one that has passed is not run again in this process.

What must hold, for prompts A = prefix + a and B = prefix + b:
  1. generating from A with the hooks, into an empty store, gives bitwise the logits of plain generate;
  2. generating from B then takes the prefix from the store, and gives bitwise the logits of plain generate
     handed the same KV in memory, and nearly those of plain generate on B: A's prefix knows nothing of a;
     with recurrent layers a prompt is cut where states are stored, so all this holds to rounding only;
  3. the same for rows with left padding; a model that fails only this is served, but not with padding;
  4. where blocks are read in place, plain generate() under the kernels gives nearly the logits that the
     model's own attention gives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

from kvclient.blocks.identity import DIGEST_BYTES, encode, without_denied
from kvclient.hf.attention.proof import MOST_TOKENS, TOLERANCE, evaluating, tokens
from kvclient.hf.attention.switch import without
from kvclient.hf.model.identity import plain
from kvclient.hf.model.structure import KVShape, Refused, base_model, check_structure, widest_window
from kvclient.hf.model.watch import Attributes, Watch
from kvclient.hf.proof import verdicts
from kvclient.hf.proof.attached import Attached
from kvclient.hf.release import cache_of, passing

BLOCK_TOKENS = 8
PREFIX_BLOCKS = 3  # at least; a window of at most MOST_TOKENS is passed
SUFFIX_TOKENS = (2, 7)  # of A and B: a prefix whose KV hangs on the length of the pass must show it
FAKE_BYTES = 256 << 20
PAGED_TOKENS = 512
_passed: dict[bytes, Verdict] = {}


@dataclass(frozen=True)
class Verdict:
    """A model that passed. `padded`: also with left padding. `difference`: of reuse to full prefill,
    relative.
    """

    padded: bool
    difference: float


def prove_model(
    model: torch.nn.Module, attach: Callable[..., Any], in_place: bool = False, paged: bool = False,
    shape: KVShape | None = None, weights: bytes = b"",
) -> Verdict:  # fmt: skip
    """attach: what is to be proven. shape: of the model's KV, if it was looked at. weights: whose verdict it
    is, where it hangs on them, as with states: b"", it is nobody else's. Raises Refused, with the reason, if
    reuse would change what the model says.

    in_place: with the attention that reads blocks where they lie. It sums in another order over blocks than
    over one tensor, so what would be bitwise then has to be equal to rounding.
    """
    model = base_model(model)
    shape = check_structure(model) if shape is None else shape
    facts = [
        type(model).__qualname__,
        plain(without_denied(model.config.to_dict())),
        str(shape),
        str(model.device),
    ]
    facts += [str(model.config._attn_implementation), str(in_place), str(paged)]
    attributes = Attributes(model)
    facts += [str(attributes.code()), str(attributes.numbers()), weights.hex()]
    key = hashlib.sha256(encode(facts)).digest()
    if key in _passed and not (shape.states and not weights):
        return _passed[key]
    with evaluating(model):
        _passed[key] = _Trial(model, shape, in_place, paged).run(attach)
    return _passed[key]


def prove(kv: Attached, model: torch.nn.Module, attach: Callable[..., Any]) -> None:
    """Tests the model as this attachment serves it; blocks are read in place only where that passes too."""
    adopted = kv._model_state.adopted
    if adopted.wanted and not adopted.asked:
        try:
            kv.padded = _kept(kv, model, attach, True, False).padded
            return
        except (Refused, RuntimeError):
            adopted.give_up(model, "self_test")
            kv._model_state.examine(model, Watch(model))
    kv.padded = _kept(kv, model, attach, adopted.wanted, adopted.paged_tokens is not None).padded


def _kept(
    kv: Attached, model: torch.nn.Module, attach: Callable[..., Any], in_place: bool, paged: bool
) -> Verdict:
    """As prove_model(), once per model and machine."""
    facts = [kv._model_state.served_models.unsalted, in_place, paged, str(model.device)]
    name = verdicts.key("self-test", facts)
    found = verdicts.load(name) or {}
    if isinstance(found.get("padded"), bool) and isinstance(found.get("difference"), float):
        return Verdict(found["padded"], found["difference"])
    shape = kv._model_state.kv
    # Whether a state hangs on the padding before it: by a bias, which is 0 in one model and not in another.
    weights = kv._model_state.served_models.unsalted if shape.states else b""
    verdict = prove_model(model, attach, in_place, paged, shape, weights)
    verdicts.save(name, dataclasses.asdict(verdict))
    return verdict


class _Trial:
    def __init__(self, model: torch.nn.Module, shape: KVShape, in_place: bool, paged: bool) -> None:
        self.model, self.shape = model, shape
        self.in_place, self.paged = in_place, paged
        self.name = type(model).__name__
        self.window = window = widest_window(model.config.get_text_config(decoder=True))
        self.block = math.lcm(BLOCK_TOKENS, shape.stride)
        passed = (window + self.block) // self.block if window <= MOST_TOKENS else 0
        self.blocks = max(PREFIX_BLOCKS, passed)
        self.prefix = tokens(model, self.block * self.blocks, 1)
        ends = (tokens(model, count, seed) for count, seed in zip(SUFFIX_TOKENS, (2, 3), strict=True))
        self.a, self.b = (torch.cat([self.prefix, end]) for end in ends)
        self.config = GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=1, pad_token_id=0, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True, use_cache=True,
        )  # fmt: skip

    def run(self, attach: Callable[..., Any]) -> Verdict:
        from kvclient.testing.in_memory import InMemoryClient

        plain_a, cache = self._first_run()
        plain_b, _ = self._generate(self.b[None])
        if self.in_place:
            with without(self.model):
                own_a, _ = self._generate(self.a[None])
            if not self._near(plain_a, own_a):
                raise Refused(
                    f"{self.name}: the kernels' attention is not the model's own: logits differ by "
                    f"{self._difference(plain_a, own_a):.2g}"
                )
        given_b = None
        if cache is not None:
            given_b, _ = self._generate(self.b[None], **passing(self._hand_over(cache)))
        rows, mask = self._padded()
        plain_rows, _ = self._generate(rows, attention_mask=mask)
        with (
            InMemoryClient(FAKE_BYTES) as client,
            attach(
                self.model,
                client,
                block_tokens=self.block,
                self_test=False,
                in_place=self.in_place,
                paged=self.paged,
                paged_tokens=PAGED_TOKENS,
                weights_digest=bytes(DIGEST_BYTES),
            ) as kv,
        ):
            cold_a, _ = self._generate(self.a[None])
            if kv.last.bypassed:
                raise Refused(f"{self.name}: generate() does not reach the store ({kv.last.bypassed})")
            if kv.last.write_bypassed == "changed":
                raise Refused(f"{self.name}: each pass changes what the next one computes with")
            if kv.last.published_blocks != self.blocks:
                raise Refused(f"{self.name}: published {kv.last.published_blocks} of {self.blocks} blocks")
            rounded = self.paged or bool(self.shape.states)
            rounded |= self.model.device.type != "cpu"  # a GPU cuts keys by where they lie
            if not (self._near(cold_a, plain_a) if rounded else torch.equal(cold_a, plain_a)):
                raise Refused(f"{self.name}: other logits with the store's cache in the place of its own")
            warm_b, _ = self._generate(self.b[None])
            if kv.last.reused_tokens != len(self.prefix):
                raise Refused(f"{self.name}: reused {kv.last.reused_tokens} of {len(self.prefix)} tokens")
            near = self._near if self.in_place else torch.equal
            if given_b is not None and not near(warm_b, given_b):
                raise Refused(
                    f"{self.name}: KV from the store gives other logits than the same KV from memory"
                )
            difference = self._difference(warm_b, plain_b)
            if not self._near(warm_b, plain_b):
                raise Refused(
                    f"{self.name}: logits differ by {difference:.2g} if a prefix is reused, at most "
                    f"{TOLERANCE[self.model_dtype]} is rounding: its KV depends on what follows it"
                )
            for _ in range(1 if self.shape.plain else 2):  # the first stores where the second's hit ends
                warm_rows, _ = self._generate(rows, attention_mask=mask)
            padded = kv.last.reused_tokens > 0 and self._near(warm_rows, plain_rows)
        return Verdict(padded, difference)

    @property
    def model_dtype(self) -> torch.dtype:
        return self.model.dtype if self.model.dtype in TOLERANCE else torch.bfloat16

    def _first_run(self) -> tuple[torch.Tensor, Any]:
        """Logits of A, and a cache of all its tokens; none where a plain
        DynamicCache does not hold all that they are."""
        if self.shape.states or self.shape.shares or self.shape.beside:
            return self._generate(self.a[None])[0], None
        logits, cache = self._generate(self.a[None], **passing(DynamicCache()))
        return self._generate(self.a[None])[0] if self.window else logits, cache

    def _generate(self, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
        options.setdefault("attention_mask", torch.ones_like(ids))
        try:
            out = self.model.generate(ids, generation_config=self.config, **options)
        except AssertionError as error:
            if _ours(error):
                raise
            reason = f"generate() fails on {ids.shape[1]} tokens: {error!r:.200}"
            raise Refused(f"{self.name}: {reason}") from error
        return out.logits[0].clone(), cache_of(out)

    def _hand_over(self, cache: Any) -> DynamicCache:
        handed = DynamicCache()
        if cache is None or any(layer.keys is None for layer in cache.layers):
            raise Refused(f"{self.name}: generate() does not fill the cache it was given")
        count = len(self.prefix)
        for index, layer in enumerate(cache.layers):
            handed.update(layer.keys[:, :, :count].clone(), layer.values[:, :, :count].clone(), index)
        return handed

    def _padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two rows: B, and a shorter prompt with the same first block behind padding."""
        short = torch.cat([self.prefix[: 2 * self.block], tokens(self.model, 3, 4)])
        pad = len(self.b) - len(short)
        rows = torch.stack(
            [self.b, torch.cat([torch.zeros(pad, dtype=torch.int64, device=short.device), short])]
        )
        mask = torch.ones_like(rows)
        mask[1, :pad] = 0
        return rows, mask

    def _near(self, value: torch.Tensor, other: torch.Tensor) -> bool:
        return self._difference(value, other) <= TOLERANCE[self.model_dtype]

    @staticmethod
    def _difference(logits: torch.Tensor, other: torch.Tensor) -> float:
        scale = float(other.abs().max()) or 1.0
        value = float((logits.float() - other.float()).abs().max()) / scale
        return value if value == value else float("inf")


def _ours(error: BaseException) -> bool:
    """Whether this library's code raised it, not the model's: then it is a bug, no reason."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("kvclient.")
