"""A step of one token through all decoder layers of a model of Llama's, Qwen's or Mistral's kind, without
torch between them.

Owns what such a step computes in: its places stand in the layers' structs once, not for each call. Never
takes a call of which a layer would compute any part otherwise. Invariant: the bits are those of the layers
one by one; a model's first step is computed both ways.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from ctypes import addressof
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvclient.hf.attention import backends, dense, handle, one_row, registered
from kvclient.hf.layers import appended, forwards, kinds, rows
from kvclient.hf.layers.decoder import Layer
from kvclient.hf.layers.forwards import Whole, takes_rows
from kvclient.hf.layers.fused import Calls, lay
from kvclient.hf.release import CACHE
from kvclient.kernels import contract

_MASK, _PLACES = "attention_mask", "position_ids"
_TOLD = {"input_ids", _MASK, _PLACES, CACHE, "use_cache"}  # of all else nothing may be said
_RECORDS = ("output_hidden_states", "output_attentions", "_output_attentions")
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
_FREE = 4  # steps' memory that is kept for the next


class Step:
    """What one step at a time computes in, with the layers' structs; layers of one shape."""

    def __init__(self, layers: list[Layer], calls: list[Calls], attends: tuple[int, bool]) -> None:
        """attends: the kernels' path, and whether they are told that a query is causal."""
        self.calls, self.attends, self._layers = calls, attends, layers
        dtype, heads = calls[0].dtype, calls[0].heads
        self.dtype = dtype
        with torch.inference_mode(False):  # who comes first may be in it, and later ones not
            self._structs = [call.take() for call in calls]
        biases = [pair for pairs in map(Calls.biases, calls, self._structs) for pair in pairs]
        self._wide, self._biases = ([pair[side] for pair in biases] for side in (0, 1))
        first = self._structs[0]
        query, key = first.before.query.outputs // heads, first.before.key.outputs // heads
        self.shape = key, heads  # of a layer's K
        with torch.inference_mode(False):
            self.cos, self.sin = (torch.empty((1, 1, heads), dtype=dtype, device="cpu") for _ in range(2))
            self._position = torch.empty((1, 1), dtype=torch.int64, device="cpu")
            self.flow = [self.cos.new_empty((1, 1, first.before.query.inputs)) for _ in range(3)]
            self._asks, self._out = (self.cos.new_empty((1, 1, query, heads)) for _ in range(2))
            self._sides = self.cos.new_empty((2, key, heads))
        self._bits = self._sides.view(_BITS[dtype]).numpy()
        self._attention = dense.arguments(
            self._asks.transpose(1, 2), self._out, key, self._position, 1.0, attends[0]
        )
        self._attention.causal = attends[1]
        self._sequences = (contract.Sequence * 1)()
        self._attention.sequences = addressof(self._sequences)
        tail, size = self._sequences[0].tail, self.cos.element_size()
        tail.k_token_stride = tail.v_token_stride = size * heads
        tail.codec = backends.DTYPES[dtype]
        memory = (self.cos, self.sin), self._asks, self._sides, self._out, self.flow
        for number, structs in enumerate(self._structs):
            lay(structs.before, structs.behind, number, 1, *memory)

    def __call__(self, memory: appended.Appended) -> torch.Tensor:
        """What the last layer answers, [1, 1, hidden], of flow[0], behind the tokens in memory, which has
        this one's K and V from then on.
        """
        threads, tail = torch.get_num_threads(), self._sequences[0].tail
        if self._biases:  # each time: somebody may have written into one
            torch._foreach_copy_(self._wide, self._biases)
        stride = memory.capacity * tail.k_token_stride
        tail.k_head_stride = tail.v_head_stride = stride
        tail.tokens = memory.tokens + 1
        self._position.fill_(memory.tokens)
        attention = self._attention
        attention.threads = threads
        for number, (layer, structs) in enumerate(zip(self._layers, self._structs, strict=True)):
            layer.fused.run_before(structs.before, threads)
            memory.write(number, self._bits)
            tail.k, tail.v = memory.places[number]
            attention.scale = layer.attends.module.scaling
            dense.run(attention)
            layer.fused.run_behind(structs.behind, threads)
        return self.flow[len(self._layers) % 2].clone()


class Stack:
    """A model's body, of a known kind, and its layers, in whose places theirs were put already."""

    def __init__(self, module: Any) -> None:
        self.module, self._usual, self._config = module, type(module).forward, module.config
        self._layers, self._whole = [Layer(layer) for layer in module.layers], Whole()
        self._windows = kinds.model(module)
        self._none = ["full_attention"] * len(self._layers) if self._windows == "layer_types" else None
        for name in ("layers", "embed_tokens", "rotary_emb", "norm"):
            self._whole.add(module, name)
        for number in range(len(self._layers)):
            self._whole.add(module.layers, str(number))
        self._called = [type(layer.module).__call__ for layer in self._layers]
        self._same: bool | None = None  # as the layers one by one; None: not known yet
        self._rows_same: bool | None = None  # the same of steps of several requests
        self._free: list[Step] = []
        self._free_rows: list[rows.Rows] = []
        self._memory: appended.Appended | None = None  # of the latest cache

    def step(self, told: dict[str, Any]) -> Any:
        """What its class answers; None: that is to be asked."""
        if handle.in_step():
            return self._step_of_rows(told)
        if self._same is False or not _TOLD.issuperset(name for name in told if told[name] is not None):
            return None
        ids, cache = told.get("input_ids"), told.get(CACHE)
        single = type(ids) is torch.Tensor and ids.shape == (1, 1) and ids.is_cpu and appended.stock(cache)
        if not single or not self._stands() or (step := self._ready()) is None:
            return None
        memory = self._memory
        held = memory is not None and memory.stands(cache)
        tokens = memory.tokens if held else appended.takes(cache, len(self._layers), step.shape, step.dtype)
        if not tokens or not _sees_all(told.get(_MASK), tokens + 1):
            return None
        hidden, places = self.module.embed_tokens(ids), told.get(_PLACES)
        if places is None:
            places = torch.full((1, 1), tokens, device="cpu")
        angles = self.module.rotary_emb(hidden, position_ids=places)
        if not self._takes(hidden, angles):
            return None
        if self._same is None:
            return self._proven(step, told, hidden, angles, tokens)
        if memory is None or not held:
            memory = self._memory = None  # what it holds goes layer by layer, as the new one takes it
            memory = appended.Appended(cache, tokens)
        hidden = self._computed(step, hidden, angles, memory)
        memory.show(cache)
        self._memory = memory
        return BaseModelOutputWithPast(last_hidden_state=self.module.norm(hidden), **{CACHE: cache})

    def _stands(self) -> bool:
        """Whether all is as it was found, nobody watches, and no gradient is wanted."""
        module, config = self.module, object.__getattribute__(self._config, "__dict__")
        here = type(module).forward is self._usual and module.config is self._config and not module.training
        plain = config.get("return_dict", True) is True and config.get("is_causal") is None
        plain = plain and not any(config.get(name) for name in _RECORDS)
        if not here or not plain or config.get("num_hidden_layers") != len(self._layers):
            return False
        if config.get(self._windows) != self._none:
            return False
        if torch.is_grad_enabled() or handle.awaited() or not self._whole.stand():
            return False
        causal = _is_causal(self._layers[0].attends.module)
        for number, layer in enumerate(self._layers):
            attention, kept = layer.attends.module, layer.module
            if type(kept).__call__ is not self._called[number] or kept._compiled_call_impl is not None:
                return False
            if attention.layer_idx != number or type(attention.scaling) is not float or not layer.stands():
                return False
            if attention.config is not self._config or layer.attends.window() is not None:
                return False
            if attention.training or _is_causal(attention) is not causal:
                return False
        return True

    def _known(self) -> tuple[list[Calls], tuple[int, bool]] | None:
        """The layers' calls, and how they attend; None: the kernels do not take the layers as they are."""
        calls, dtype = [], self._layers[0].proven
        for layer in self._layers:
            if (made := layer.fused.calls(dtype)) is None:
                return None
            calls.append(made)
        return None if (attends := self._attends(dtype)) is None else (calls, attends)

    def _ready(self) -> Step | None:
        """What the next step is computed in; None: it cannot be."""
        if (known := self._known()) is None:
            return None
        calls, attends = known
        with contextlib.suppress(IndexError):  # another thread may take the last
            while True:
                step = self._free.pop()
                if step.calls == calls and step.attends == attends:
                    return step
        return Step(self._layers, calls, attends) if _alike(calls) else None

    def _ready_rows(self) -> rows.Rows | None:
        """The same of a step of several requests, whose attention is one of registered.register()'s."""
        known = self._known()
        if known is None or known[1][1] is not True or not _alike(known[0]):
            return None
        calls, (path, _) = known
        with contextlib.suppress(IndexError):
            while True:
                step = self._free_rows.pop()
                if step.calls == calls and step.path == path:
                    return step
        return rows.Rows(self._layers, calls, path)

    def _step_of_rows(self, told: dict[str, Any]) -> Any:
        """step() of the newest tokens of several requests, which are a cache of kvclient.hf.cache.ragged: of
        one token each. Of more its class computes all but what nobody wants of the last layer.
        """
        ids, angled, cache = told.get("input_ids"), told.get(_PLACES), told.get(CACHE)
        whole = type(ids) is torch.Tensor and ids.ndim == 2 and ids.shape[1] == 1 and ids.is_cpu
        if not whole or angled is None or told.get(_MASK) is not None or not rows.ours(cache):
            return None
        if not _TOLD.issuperset(name for name in told if told[name] is not None) or not self._stands():
            return None
        if (places := rows.places_of(cache, len(self._layers), len(ids))) is None:
            unseen = forwards.is_unseen(self.module)  # who looks at the body sees all that goes in
            cache.layers[-1].ends = unseen and len(cache.layers) == len(self._layers)
            return None
        if self._rows_same is False or (step := self._ready_rows()) is None:
            return None
        hidden = self.module.embed_tokens(ids)
        angles = self.module.rotary_emb(hidden, position_ids=angled)
        if not self._takes(hidden, angles, len(ids)):
            return None
        if self._rows_same is None:
            return self._proven_rows(step, told, hidden, angles, places)
        out = step(hidden, angles, cache.layers, places)
        if len(self._free_rows) < _FREE:
            self._free_rows.append(step)
        for layer in cache.layers:
            layer.took()
        return BaseModelOutputWithPast(last_hidden_state=self.module.norm(out), **{CACHE: cache})

    def _proven_rows(
        self, step: rows.Rows, told: dict[str, Any], hidden: torch.Tensor, angles: Any, places: rows.Places
    ) -> Any:
        """What its class answers, and whether this is the same to the bit, in the caches too."""
        self._rows_same = False
        try:
            found = self.module.norm(step(hidden, angles, told[CACHE].layers, places))
        except Exception:  # the call is answered all the same
            return None
        ours = rows.written(places)
        out = self._usual(self.module, **told)
        pairs = zip(ours, rows.written(places), strict=True)
        same = torch.equal(found, out.last_hidden_state)
        self._rows_same = same and all(bool((a == b).all()) for a, b in pairs)
        return out

    def _attends(self, dtype: torch.dtype) -> tuple[int, bool] | None:
        """The kernels' path by which its attention computes one query, and whether as a causal one's."""
        attends = self._layers[0].attends
        function = attends.function()
        if function is one_row.attention:
            path, causal = one_row.path_of(dtype, attends.module.head_dim), False
        else:
            path = _path_of(function, dtype, attends.module.head_dim)
            causal = _is_causal(attends.module)
        return None if path is None else (path, causal)

    def _takes(self, hidden: Any, angles: Any, count: int = 1) -> bool:
        """Whether hidden [count, 1, inputs] and cos and sin [count, 1, head_dim] are rows for the kernels."""
        layer = self._layers[0]
        plain = takes_rows(hidden, layer.module.input_layernorm._parameters.get("weight"))
        return plain and hidden.shape[:-1] == (count, 1) and layer.attends.fit(hidden, angles)

    def _computed(
        self, step: Step, hidden: torch.Tensor, angles: Any, memory: appended.Appended
    ) -> torch.Tensor:
        step.flow[0].copy_(hidden)
        step.cos.copy_(angles[0])
        step.sin.copy_(angles[1])
        out = step(memory)
        if len(self._free) < _FREE:
            self._free.append(step)
        return out

    def _proven(
        self, step: Step, told: dict[str, Any], hidden: torch.Tensor, angles: Any, tokens: int
    ) -> Any:
        """What its class answers, and whether this is the same to the bit, in the cache too."""
        before, found = appended.beside(told[CACHE]), None
        try:
            memory = appended.Appended(before, tokens)
            found = self.module.norm(self._computed(step, hidden, angles, memory))
            memory.show(before)
        except Exception:  # as no room for the cache twice: the call is answered all the same
            self._same = False
        out = self._usual(self.module, **told)
        if self._same is not False:
            self._same = torch.equal(found, out.last_hidden_state) and all(
                torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
                for ours, theirs in zip(before.layers, told[CACHE].layers, strict=True)
            )
        return out


def _is_causal(attention: Any) -> bool:
    """Whether a query is told not to see the keys behind it, where no mask says so."""
    return bool(getattr(attention, "is_causal", True))


def _alike(calls: list[Calls]) -> bool:
    """Whether layers of these calls take turns, and their queries go to keys by groups."""
    _, query, key, _ = calls[0].shape
    return len({call.shape for call in calls}) == 1 and query % key == 0 and query // key <= contract.MAX_GQA


def _path_of(function: Any, dtype: torch.dtype, head_dim: int) -> int | None:
    """Of the CPU's kernels, by which what registered.register() made computes one query without a mask; None:
    it does not, or is another's.
    """
    if not isinstance(function, functools.partial) or function.func is not registered.attention:
        return None
    backend = function.args[0]
    fits = backend.device == "cpu" and backends.unfit(torch.device("cpu"), dtype, head_dim, backend) is None
    return backend.path if fits else None


def _sees_all(mask: Any, keys: int) -> bool:
    """Whether a model's mask lets its one query see so many keys."""
    if mask is None:
        return True
    whole = type(mask) is torch.Tensor and mask.shape == (1, keys) and mask.dtype in (torch.bool, torch.int64)
    return whole and bool(mask.all())


def of_model(module: Any) -> Callable[..., Any]:
    """In the place of its class's. Its layers have their forwards already."""
    stack = Stack(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = None if args else stack.step(kwargs)
        return type(module).forward(module, *args, **kwargs) if out is None else out

    return forward


def fits(module: Any) -> bool:
    """Whether a model's body is of the known kind, as are all its layers, which stand as they were put."""
    if not appended.known() or kinds.model(module) is None or not len(module.layers):
        return False
    for layer in module.layers:
        if not forwards.stands(layer) or not kinds.layer(layer) or kinds.scaled(layer):
            return False
        attends = kinds.attention(layer.self_attn)
        if attends is None or attends.switched:
            return False
    return True
