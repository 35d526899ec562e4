"""Engine: a model, its tokenizer and the store behind three lines.

    engine = kvclient.hf.Engine.from_pretrained("model-directory", client=kvclient.connect())
    engine.warm(document)
    print(engine.generate(document + question, max_new_tokens=50).text)

Owns texts and their tokens, and what a call is asked for. Never touches KV: that is the attachment's
(kvclient.hf.attach), under a stock generate(). Invariant: mode="baseline" is plain generate() on the same
tokens with the same sampling, so what the store does to an answer can always be seen.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
import transformers

from kvclient.blocks.codec import Kivi
from kvclient.blocks.reuse_plan import plan
from kvclient.errors import InvalidArgument
from kvclient.hf.attachment.attach import Attachment, attach
from kvclient.hf.call import Report
from kvclient.hf.decoding.stopping import Listener, end_tokens
from kvclient.hf.engine.conversation import Conversation
from kvclient.hf.engine.loading import load
from kvclient.hf.engine.renamed import METHODS, missing, saying_new_names
from kvclient.hf.engine.results import Result, Warmed
from kvclient.hf.engine.sampling import sampling_of
from kvclient.hf.engine.saved_state import SavedState
from kvclient.hf.engine.store import open_store
from kvclient.hf.engine.window import Window
from kvclient.hf.reuse.quality.verify import Verification
from kvclient.hf.speculation import Speculation
from kvclient.hf.streaming import StreamingConfig

MODES = ("baseline", "prefix", "chunk")
Codec = str | Kivi | None  # None: as attach() was told
Prompt = str | Sequence[int] | Sequence[dict[str, str]]  # text, token ids, or a chat's messages


class Engine:
    """Thread-safe as far as the model is: one generate() per thread."""

    @saying_new_names(attach)
    def __init__(
        self, model: torch.nn.Module, tokenizer: Any, client: Any = None, *, memory_bytes: int | None = None,
        disk_dir: str | os.PathLike[str] | None = None, disk_bytes: int | None = None, **attach_options: Any,
    ) -> None:  # fmt: skip
        """client: as from_pretrained() takes it. Other options are attach()'s."""
        self.model, self.tokenizer = model, tokenizer
        client, self._owned = open_store(client, memory_bytes, disk_dir, disk_bytes)
        try:
            self.kv: Attachment = attach(model, client, **{"tokenizer": tokenizer, **attach_options})
        except BaseException:
            self._close_store(client)
            raise
        self._pinned: dict[tuple[int, ...], contextlib.ExitStack] = {}
        self._lock = threading.Lock()  # of that

    @classmethod
    @saying_new_names(attach, open_store)
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], client: Any = None, *, dtype: str | torch.dtype = "auto",
        device: str | None = None, gguf_file: str | None = None, streaming: StreamingConfig | None = None,
        **options: Any,
    ) -> Engine:  # fmt: skip
        """A model by hub id, directory or .gguf file. client: None attaches to this host's daemon, and goes
        on without, with a warning, while there is none; "memory" is a store inside this process, of
        memory_bytes, whose blocks go to disk_dir (disk_bytes at most) when they leave memory. device: "auto"
        takes the accelerator torch has, or the CPU. streaming: layers are read from the directory as they
        compute (kvclient.hf.streaming), on the device that it says. Other options are attach()'s.
        """
        model, tokenizer = load(name_or_path, dtype, device, gguf_file, streaming)
        return cls(model, tokenizer, client, **options)

    # ---------------------------------------------------------------- computing

    @saying_new_names()
    def warm(
        self, text: Prompt, before: Prompt = "", *, chunker: str | None = None,
        overlap_tokens: int | None = None, codec: Codec = None,
    ) -> Warmed:  # fmt: skip
        """Computes a text and leaves its KV in the store: at the start of a prompt it is reused exactly,
        elsewhere approximately, if that is switched on. before: what it will probably stand behind: the
        nearer to that it was computed, the less there is to repair. chunker: "fixed" computes it whole;
        "sentence", "paragraph" and "document" (kvclient.blocks.chunker) each part for itself, for prompts
        that are assembled from parts; overlap_tokens: each behind so many of the tokens before it; codec: how
        its blocks hold K and V (Attachment.coded). Without them, as attach() was told.
        """
        first, ids = self.encode(before) if before else [], self.encode(text)
        with self._coded(codec):
            stored = self.kv.warm(ids, first, chunker=chunker, overlap_tokens=overlap_tokens)
        size, tail, note = self.kv.chunker.block_tokens, stored.tail, ""
        if stored.missing:
            note = f"{stored.missing} of its blocks are not in the store: it has no room, or is not there"
        elif tail == stored.last:
            note = f"{tail} tokens fill no block of {size}: only a longer text that begins so is found"
        elif stored.lost:
            whole = stored.parts == 1
            count = f"last {stored.lost} tokens" if whole else f"{stored.lost} tokens at parts' ends"
            note = f"the {count} fill no block of {size} and are computed each time"
        return Warmed(len(first) + len(ids), stored.blocks, size, tail == 0, tail, note, stored.parts)

    @saying_new_names()
    def generate(
        self, prompt: Prompt, max_new_tokens: int = 64, mode: str = "chunk", *,
        on_token: Callable[[int, str], None] | None = None, cacheable_prefix_len: int | None = None,
        temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, stop: str | Sequence[str] = (),
        soft_stop: float = 1.0, repetition_penalty: float = 1.0, seed: int | None = None,
        prefill_chunk_size: int | None = None, codec: Codec = None, speculation: Speculation | None = None,
    ) -> Result:  # fmt: skip
        """One answer. mode: "baseline" without the store, "prefix" with exact reuse only, "chunk" with all
        that is switched on. on_token: called with each token's id and the text it adds. cacheable_prefix_len:
        only so many of the prompt's tokens are published. temperature 0 takes the most likely token.
        soft_stop: from this share of max_new_tokens on, the answer ends with a sentence. codec: of the blocks
        that are stored and found; None: attach()'s. speculation: several tokens a pass, the same answer.
        """
        sampling = sampling_of(temperature, top_p, top_k, repetition_penalty, prefill_chunk_size)
        sampling |= {"custom_generate": speculation} if speculation is not None else {}
        with self._coded(codec):
            return self._answers(
                [prompt], [max_new_tokens], mode, on_token, cacheable_prefix_len, stop, soft_stop, seed,
                sampling,
            )[0]  # fmt: skip

    @saying_new_names()
    def generate_batch(
        self, prompts: Sequence[Prompt], max_new_tokens: int | Sequence[int] = 64, mode: str = "chunk", *,
        cacheable_prefix_len: int | None = None, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
        stop: str | Sequence[str] = (), soft_stop: float = 1.0, repetition_penalty: float = 1.0,
        seed: int | None = None, codec: Codec = None,
    ) -> list[Result]:  # fmt: skip
        """An answer per prompt, of any lengths, computed together; a shared prefix is loaded once. Raises
        InvalidArgument for a single text, or other than one limit a prompt.
        """
        if isinstance(prompts, str):
            raise InvalidArgument("prompts is one text; it must be a list of prompts")
        if not prompts:
            return []
        several = isinstance(max_new_tokens, Iterable)
        limits = list(max_new_tokens) if several else [max_new_tokens] * len(prompts)
        if len(limits) != len(prompts):
            raise InvalidArgument(f"{len(limits)} limits for {len(prompts)} prompts")
        sampling = sampling_of(temperature, top_p, top_k, repetition_penalty, None)
        with self._coded(codec):
            return self._answers(
                prompts, limits, mode, None, cacheable_prefix_len, stop, soft_stop, seed, sampling
            )

    def conversation(
        self, name: str, system: Prompt = "", window: Window | None = None, priority: int = 50
    ) -> Conversation:
        """A conversation in bounded memory; goes on where one of that name, under the same window, was left
        by any process with this model. system: kept in full for as long as it lasts. priority: of its state
        in the store. Raises Refused while generate() would go without the store, as a turn does, and a turn
        too once the model is another than the one that computed the turns before: their words are not kept.
        """
        window = Window() if window is None else window
        saved_state = SavedState(self.kv.client, lambda: self.kv._served().identity, name, window, priority)
        ids = self.encode(system) if system else []
        parts = (self.model, self.tokenizer, saved_state, window, ids, self._ends)
        return Conversation(*parts, self._computed_by)

    def _computed_by(self) -> bytes:
        """The identity of the model as it is now, whatever the namespace's salt."""
        self.kv._served()
        return self.kv._model_state.served_models.unsalted

    # ---------------------------------------------------------------- keeping

    def keys(self, text: Prompt) -> Any:
        """The keys of a text's whole blocks, as the prefix of a prompt: for the client's calls (lookup,
        delete, touch, prefetch) and kvclient.blocks.Evictions.
        """
        return self.kv.chunker.chain(self.kv.identity, self.encode(text))

    def pin(self, text: Prompt) -> int:
        """Keeps the blocks of a text from eviction until unpin() or the end of this process, whatever stood
        before it when they were computed, with a codec those as computed too; says how many.
        """
        ids = tuple(self.encode(text))
        client, served, chunker = self.kv.client, self.kv._chosen(), self.kv.chunker
        with contextlib.ExitStack() as pins, plan(client, served.identity, ids, chunker=chunker) as found:
            # The plan holds every copy of them that it came upon: of these one is enough.
            held = [client.get(list({piece.key: None for chain in found for piece in chain.pieces}))]
            pins.callback(held[0].release)
            if served.sinks is not None:
                held.append(served.sinks.get(client, chunker, ids))
                pins.callback(held[1].release)
            for chain in served.beside(chunker, ids):
                held.append(client.get(chain))
                pins.callback(held[-1].release)
            count = sum(blocks.hits for blocks in held)
            self._keep(ids, pins.pop_all() if count else None)
        return count

    def unpin(self, text: Prompt) -> None:
        """Lets go of what pin() kept of that text. One that is not pinned is no error."""
        self._keep(tuple(self.encode(text)), None)

    def _keep(self, ids: tuple[int, ...], pins: contextlib.ExitStack | None) -> None:
        """In the place of what is kept of that text."""
        with self._lock:
            before = self._pinned.pop(ids, None)
            if pins is not None:
                self._pinned[ids] = pins
        if before is not None:
            before.close()

    # ---------------------------------------------------------------- seeing

    def stats(self) -> dict[str, Any]:
        """Sums over the calls, hit_rate (of calls) and token_hit_rate (of prompts' tokens) among them, and
        under "store" the namespace's figures."""
        return {**self.kv.stats, "pinned": len(self._pinned), "store": self.kv.client.stats()}

    def verify(self, prompts: Sequence[Any] | None = None) -> Verification:
        """How far each way of reuse takes this model from a cold run; see Attachment.verify. prompts: also
        pairs of texts, (prompt, answer).
        """
        return self.kv.verify(self._questions(prompts))

    def calibrate(
        self, prompts: Sequence[Any] | None = None, progress: Callable[[int, int], None] | None = None,
        max_kl: float | None = None,
    ) -> Verification:  # fmt: skip
        """Switches approximate reuse on if it stays near enough; see Attachment.calibrate."""
        return self.kv.calibrate(self._questions(prompts), progress, max_kl=max_kl)

    def _questions(self, prompts: Sequence[Any] | None) -> list[Any] | None:
        def tokens(prompt: Any) -> Any:
            if not (isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], str)):
                return self.encode(prompt)
            answer = self.tokenizer(prompt[1], add_special_tokens=False)["input_ids"]
            return self.encode(prompt[0]), list(answer)

        return None if prompts is None else [tokens(prompt) for prompt in prompts]

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt: of a text, of a chat by its template, or as given. Raises InvalidArgument
        for a token the model has not.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if len(prompt) and isinstance(prompt[0], dict):
            template = self.tokenizer.apply_chat_template
            told = template(list(prompt), add_generation_prompt=True, tokenize=False)
            return list(self.tokenizer(told, add_special_tokens=False)["input_ids"])
        try:
            ids = [operator.index(token) for token in prompt]  # also NumPy's and torch's; 2.5 is none
        except TypeError as error:
            raise InvalidArgument(f"a prompt of tokens: {error}") from None
        known = self.model.get_input_embeddings().num_embeddings
        if wrong := [token for token in ids if not 0 <= token < known]:
            raise InvalidArgument(f"token {wrong[0]}; the model has {known}")
        return ids

    def reset(self) -> int:
        """Deletes every block of a store inside this process; says how many. Raises InvalidArgument for a
        daemon's, which others use too.
        """
        reset = getattr(self.kv.client, "reset", None)
        if reset is None:
            raise InvalidArgument("a daemon's blocks are not this engine's alone; see `kvstored flush`")
        return reset()

    def close(self) -> None:
        """Gives the model its own generate() back, lets go of what was pinned; a given client stays open."""
        for ids in list(self._pinned):
            self._keep(ids, None)
        self.kv.detach()
        self._close_store(self.kv.client)

    def _close_store(self, client: Any) -> None:
        if self._owned:
            client.close()

    def __getattr__(self, name: str) -> Any:
        raise missing("Engine", METHODS, name)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # ---------------------------------------------------------------- one call

    def _answers(
        self, prompts: Sequence[Prompt], limits: list[int], mode: str,
        on_token: Callable[[int, str], None] | None,
        cacheable: int | None, stop: str | Sequence[str], soft_stop: float, seed: int | None,
        sampling: dict[str, Any],
    ) -> list[Result]:  # fmt: skip
        began = time.perf_counter()
        if mode not in MODES:
            raise InvalidArgument(f"mode={mode!r}; it must be one of {', '.join(MODES)}")
        if not all(isinstance(limit, Integral) for limit in limits):
            raise InvalidArgument(f"max_new_tokens={limits}; whole numbers are wanted")
        limits = [int(limit) for limit in limits]
        if min(limits) < 1 or (cacheable is not None and cacheable < 0):
            values = f"max_new_tokens={min(limits)}, cacheable_prefix_len={cacheable}"
            raise InvalidArgument(f"{values}: too small")
        rows = [self.encode(prompt) for prompt in prompts]
        if not all(rows):
            raise InvalidArgument("a prompt without tokens")
        stops = [stop] if isinstance(stop, str) else list(stop)
        stops = [stop for stop in stops if stop]
        listener = Listener(limits, self.tokenizer, self._ends, stops, on_token, began, soft_stop)
        with contextlib.ExitStack() as context:
            if mode == "baseline":
                context.enter_context(self.kv.bypass())
            context.enter_context(self.kv.limited(mode == "chunk", cacheable))
            if seed is not None:
                devices = [self.model.device] if self.model.device.type == "cuda" else []
                context.enter_context(torch.random.fork_rng(devices=devices))
                torch.manual_seed(seed)
            out = self._run(rows, listener, sampling | {"max_new_tokens": max(limits)})
        ended, report = time.perf_counter(), self._last()
        drafted = getattr(sampling.get("custom_generate"), "last", None)
        results = []
        for index, row in enumerate(rows):
            tokens, text, finish = listener.answer(index)
            rest = max(len(tokens) - 1, 0)
            speed = rest / (ended - listener.first_at) if rest and ended > listener.first_at else 0.0
            logits = out.logits[0][index].detach().clone()
            times = (listener.first_at - began, ended - began, speed)
            row_report = report.of_row(index)
            results.append(Result(text, tokens, len(row), *times, row_report, logits, finish, mode, drafted))
        return results

    def _coded(self, codec: Codec) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if codec is None else self.kv.coded(codec)

    @property
    def _ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        ends, end = end_tokens(self.model.generation_config.eos_token_id), self.tokenizer.eos_token_id
        return frozenset(ends if end is None else [*ends, end])

    def _run(self, rows: list[list[int]], listener: Listener, options: dict[str, Any]) -> Any:
        length, device = max(map(len, rows)), self.model.device
        pad = self.tokenizer.pad_token_id
        pad = pad if pad is not None else self.tokenizer.eos_token_id or 0
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
        options = {"max_new_tokens": 1, "pad_token_id": pad, **options}
        return self.model.generate(
            ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True,
            stopping_criteria=transformers.StoppingCriteriaList([listener]), **options,
        )  # fmt: skip

    def _last(self) -> Report:
        return self.kv.last_here
