"""attach(): a stock model.generate() that looks up, loads, generates and publishes.

Owns the methods it puts on the model instance (generate, and steps inside it) and takes them off again. Never
changes the model's class, weights or configuration. Invariant: while attached, every generate() of the model
goes by kvclient.hf.attachment.running, and none after detach() has begun.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvclient.blocks.chunker import Chunker
from kvclient.blocks.codec import Kivi
from kvclient.blocks.identity import salt_of
from kvclient.blocks.layout import DEFAULT_BLOCK_TOKENS
from kvclient.checks import check_real
from kvclient.errors import Closed, InvalidArgument
from kvclient.hf import attention
from kvclient.hf.attachment import decode_graph, running
from kvclient.hf.attachment.kernel_install import Adopted
from kvclient.hf.attachment.model_state import CALIBRATED, ModelState
from kvclient.hf.attachment.publish import publish
from kvclient.hf.attachment.settings import Scoped, Settings, ThisThread
from kvclient.hf.attachment.warm import Stored, check_overlap, warm
from kvclient.hf.cache.layer import Memory
from kvclient.hf.cache.page_pool import PagedStats
from kvclient.hf.call import Report, Totals
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.handoff.prefill import hand_off
from kvclient.hf.handoff.prompts import LEASE_S, Handoff
from kvclient.hf.handoff.resume import resume
from kvclient.hf.model.structure import Refused, base_model
from kvclient.hf.proof import measure
from kvclient.hf.proof.self_test import Verdict, prove, prove_model
from kvclient.hf.release import name_of
from kvclient.hf.request.load_or_compute import PrefillSpeed
from kvclient.hf.request.options import STATE_EVERY_BLOCKS, Options, raising
from kvclient.hf.request.returned import Returned
from kvclient.hf.request.served_model import AS_COMPUTED, ServedModel, codec_of
from kvclient.hf.request.tolerance import Rest
from kvclient.hf.reuse.quality.verify import Verification
from kvclient.hf.reuse.repair import Repair


def attach(
    model: torch.nn.Module,
    client: Any,
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    salt: bytes | str | None = None,
    on_error: str = "miss",
    priority: int = 35,
    ttl_s: float | None = None,
    follow: bool = True,
    follow_timeout_s: float = 5.0,
    publish_generated: bool = True,
    repair: str | Repair | None = CALIBRATED,
    codec: str | Kivi | None = None,
    chunker: str = "fixed",
    overlap_tokens: int = 0,
    tokenizer: Any = None,
    weights_digest: bytes | None = None,
    self_test: bool = True,
    in_place: bool | None = None,
    paged: bool = False,
    paged_tokens: int = 32768,
    state_every_blocks: int = STATE_EVERY_BLOCKS,
) -> Attachment:
    """Puts the store behind `model.generate()`. Raises Refused, with the reason, if this model cannot be
    served right, and InvalidArgument. block_tokens, priority, ttl_s: of the blocks it publishes, those of
    answers too (publish_generated). self_test: first prove on this model that its answers stay the same.

    salt: prompts under different salts share nothing; the namespace's own salt is mixed in too. on_error: a
    store that fails under generate() is gone on without, and `last`, a warning and the log say so; "raise":
    the call ends with its error. follow: take KV layer by layer from a process that is computing it now;
    follow_timeout_s without progress of it, and this one computes by itself. repair: also use what is stored
    of the prompt behind its prefix, computed behind other tokens and moved here, and how it is made right:
    "auto", "none", "selective", "cacheblend", "attention" or a Repair. The answer is then near a full
    prefill's, not equal. None: prefixes only. "calibrated": None until calibrate() has passed for this model
    on this machine. "auto" promises Repair.max_kl: before calibrate(max_kl=) nothing is reused so. codec:
    "int8", "int4" or a Kivi: blocks hold K and V in 8 or 4 bits, two or four times as many tokens, near what
    was computed. chunker: where prompts are cut into blocks (kvclient.blocks.chunker), but for "fixed" as
    `tokenizer` says. overlap_tokens: of true context before each part of warm(). in_place: attend to blocks
    where they lie, with native kernels (kvclient.hf.attention), the model's attention until detach(), without
    a dense copy. None: wherever the kernels fit and the model's attention is the one transformers chose;
    where not, `backend` says what computes it, and kvclient.hf.attention.fallbacks() why. paged: in place,
    and tokens that are not in the store lie in pages of a pool of paged_tokens for all calls at once; rows,
    beams and copies of a cache share them until they differ. weights_digest: 32 bytes to stand for the
    weights, for models too large to be digested at every start (1.3 GB/s a core). state_every_blocks: of
    recurrent layers, how often a prompt's state (`state_bytes`) is stored besides at its end.
    A model that is changed while attached, its code included, is digested anew at its next call, but for what
    hides from kvclient.hf.model.watch and kvclient.hf.model.code.
    """
    model = base_model(model)
    if model.__dict__.get(running.PLACE) is not None:
        raise InvalidArgument("this model is attached already; detach() that one first")
    _check_client(client)
    codec = codec_of(codec, cut := Chunker(chunker, block_tokens, tokenizer))
    options = Options(
        cut, priority, ttl_s, follow, follow_timeout_s, publish_generated, running.chunked_reads(model),
        name_of(model), raises=raising(on_error), state_every_blocks=state_every_blocks,
    ).checked()  # fmt: skip
    inside = repair if repair == CALIBRATED or isinstance(repair, Repair | None) else Repair(repair)
    adopted = Adopted(model, in_place, paged_tokens if paged else None)
    try:
        state = ModelState(model, client, options, salt_of(salt), weights_digest, inside, codec, adopted)
        attachment = Attachment(model, client, state, overlap_tokens)
        if self_test:
            prove(attachment, model, attach)
    except BaseException:
        adopted.give_back(model)
        raise
    running.install(attachment, model)
    return attachment


def _check_client(client: Any) -> None:
    if isinstance(client, type) or not all(hasattr(client, name) for name in ("salt", "get", "create")):
        what = "kvclient.connect(), or kvclient.InMemoryClient(bytes) without a daemon"
        raise InvalidArgument(f"client={client!r:.80} is no client; it must be one of {what}")


def self_test(model: torch.nn.Module, in_place: bool = False, paged: bool = False) -> Verdict:
    """What attach() proves of a model first: the same answers with the store as without. Raises Refused, with
    the reason. in_place: with the attention that reads blocks where they lie.
    """
    return prove_model(model, attach, in_place, paged)


class Attachment(Scoped):
    """What attach() returns. `last` is the Report of the last call that ended, `stats` the sums over all."""

    def __init__(
        self, model: torch.nn.Module, client: Any, model_state: ModelState, overlap_tokens: int
    ) -> None:
        self.client = client
        self.padded = True  # whether rows with left padding are served; the self-test decides
        self.last: Report | None = None
        self.decoding, self._warned, self.overlap_tokens = 0, set[str](), check_overlap(overlap_tokens)
        self._model_state, self._lock = model_state, threading.Lock()
        self._local = ThisThread(Settings(model_state.codec))
        self._model: torch.nn.Module | None = model
        self._before: dict[str, Any] = {}  # the model's methods, where hooks stand now
        self._totals, self._memory, self._pace = Totals(), Memory(), PrefillSpeed()
        self._running, self._rest, self._returned = running.Running(), Rest(), Returned()

    # ---------------------------------------------------------------- what users call

    @property
    def stats(self) -> dict[str, Any]:
        """The sums of all reports since attach: requests, hits, tokens, seconds, and bypasses by reason."""
        return self._totals.snapshot()

    def give_back(self) -> None:
        """Lets go of the memory that is kept for the next call's KV: for who will not ask again soon."""
        self._memory.give_back()

    @property
    def last_here(self) -> Report | None:
        """The Report of this thread's last call, whatever others have asked meanwhile."""
        return self._local.last

    @property
    def backend(self) -> str:
        """What computes the model's attention: a name of kvclient.hf.attention, or the model's own."""
        model = self._attached_model()
        return attention.installed(model) or str(model.config._attn_implementation)

    def paged_stats(self) -> PagedStats:
        """Pages in use, shared and copied. Raises InvalidArgument without paged=True."""
        if self._model_state.options.pool is None:
            raise InvalidArgument("this attachment has no pages; attach with paged=True")
        return self._model_state.options.pool.stats

    @property
    def identity(self) -> bytes:
        """The reuse identity: 32 bytes that two processes share exactly if their KV is interchangeable."""
        return self._chosen().identity

    @property
    def form(self) -> BlockFormat:
        """How the blocks of this thread's calls hold K and V."""
        return self._chosen().form

    @property
    def state_bytes(self) -> int:
        """Of one stored state of the model's recurrent layers; 0: it has none."""
        states = self._chosen().states
        return 0 if states is None else states.nbytes

    @property
    def chunker(self) -> Chunker:
        """The rule that prompts are cut into blocks by."""
        return self._model_state.options.chunker

    @property
    def repair(self) -> Repair | None:
        """How what is reused inside a prompt is made right; None while only prefixes are reused."""
        return getattr(self._chosen().non_prefix, "repair", None)

    def verify(
        self, prompts: Sequence[Any] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Verification:
        """Measures each way of reuse against a cold run: KL, top-1 agreement, first divergence, TTFT.
        prompts: token ids of texts as they will be asked, 96 at least each, whose end is taken for the
        answer, or pairs of them (prompt, answer), measured at the answer's positions; without, the model
        writes some. Takes a few dozen prefills, in an in-memory store. progress: called with steps done, and
        of how many.
        """
        return measure.verify(self, self._attached_model(), prompts, progress)

    def calibrate(
        self, prompts: Sequence[Any] | None = None, progress: Callable[[int, int], None] | None = None, *,
        max_kl: float | None = None,
    ) -> Verification:  # fmt: skip
        """Measures approximate reuse, and switches it on, here and for later attachments of this model on
        this machine, with the least repair that passes; without one off, unless attach() was told a repair.
        Arguments are verify()'s; on a terminal it counts its steps. Interrupted and called again, with the
        same prompts, it goes on where it was. max_kl, nats: measures that promise, and switches "auto" on
        with the least caution that keeps it on these prompts: their mean is at most max_kl, and 2 % of them
        have more than twice that. Attachments with the same repair="auto" take that caution over; where none
        keeps it they reuse nothing. None, where attach() was told a promise: that one.
        """
        model = self._attached_model()
        if max_kl is None:
            max_kl = self._model_state.told_promise
        else:
            check_real("max_kl", max_kl, 0, math.inf)
        with self.coded(self._model_state.codec or AS_COMPUTED):
            verification, *found = measure.calibrate(self, model, prompts, progress, max_kl)
        self._model_state.calibrated(*found, max_kl)
        return verification

    def warm(
        self, token_ids: Sequence[int], before: Sequence[int] = (), *, chunker: str | None = None,
        overlap_tokens: int | None = None,
    ) -> Stored:  # fmt: skip
        """Computes a text and leaves its KV in the store; see kvclient.hf.attachment.warm."""
        overlap = self.overlap_tokens if overlap_tokens is None else overlap_tokens
        return warm(self, self._attached_model(), list(token_ids), list(before), chunker, overlap)

    def publish(self, token_ids: Sequence[int], cache: Any, behind: int = 0) -> int:
        """Leaves in the store what a caller's own loop computed; see kvclient.hf.attachment.publish."""
        return publish(self, self._attached_model(), token_ids, cache, behind)

    def handoff(self, *, lease_s: float = LEASE_S, to: str | None = None, **inputs: Any) -> Handoff:
        """Prefills prompts in a thread, for resume() elsewhere, and holds their blocks so long without a word
        of who resumes; see kvclient.hf.handoff. `to`: the node that will decode, which comes for the layers
        at once, before it is asked (share = "read-write" there)."""
        return hand_off(self, self._attached_model(), lease_s, to, inputs)

    def resume(self, handoff: Handoff, **generate_kwargs: Any) -> Any:
        """What generate() returns for handed prompts, with the KV that was, or is being, computed there."""
        return resume(self, self._attached_model(), handoff, generate_kwargs)

    def decode_graph(self) -> contextlib.AbstractContextManager[None]:
        """Within it, this thread's calls decode over memory that does not move: on a GPU, a CUDA graph."""
        return decode_graph.decoding(self, self._attached_model())

    def refresh(self) -> None:
        """Digests the model anew: needed only after its weights were written through `.data`."""
        self._model_state.renew(self._attached_model())

    def detach(self) -> None:
        """Gives the model its own generate() back, once the calls of other threads have ended; those that
        begin meanwhile go without the store. Idempotent. Raises DeadlineExceeded after ten minutes; called
        again it waits again.
        """
        model = self._model
        if model is None or model.__dict__.get(running.PLACE) is not self:
            self._model = None
            return
        running.put_back(self, model, "generate")
        self._running.wait()
        self._model = None
        self._model_state.adopted.give_back(model)
        model.__dict__.pop(running.PLACE, None)
        for name in self._before:
            running.put_back(self, model, name)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.detach()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied or unpickled model is not attached

    def _attached_model(self) -> torch.nn.Module:
        if self._model is None:
            raise Closed("this attachment was detached")
        return self._model

    # ---------------------------------------------------------------- what it knows about the model

    def _current(self, model: torch.nn.Module) -> ServedModel | None:
        """The model as it is now, or None if it was changed into one that is refused."""
        return self._chosen() if self._model_state.current(model) else None

    def _served(self, modes: bool = True) -> ServedModel:
        """The model as it is now. Raises Refused where generate() would go without the store."""
        served = self._current(self._attached_model())
        if served is None:
            raise Refused(str(self._model_state.refusal))
        if modes and (random := self._model_state.watch.random()) is not None:
            raise Refused(random)
        return served

    def _chosen(self) -> ServedModel:
        """That of the codec and the salt this thread's calls want."""
        settings = self._local.settings
        return self._model_state.of(settings.codec, settings.salt)
