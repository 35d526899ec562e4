"""A causal model of which some layers lie on the disk.

Owns the model's parameters: which are filled for good, and which only while their layer computes. Never
changes a module's forward. Invariant: a streamed weight is a tensor without memory (torch's "meta") whenever
its layer does not compute, so that nobody reads what another layer has put there.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvclient.errors import InvalidArgument
from kvclient.hf.awq.checkpoint import MIDDLE, _group_of
from kvclient.hf.awq.linear import AwqLinear
from kvclient.hf.streaming.files.checkpoint import directory_of
from kvclient.hf.streaming.files.headers import Source, tensors
from kvclient.hf.streaming.files.index import BLOCK_BYTES, Arrangement, Part, Stored, Table, sources, split
from kvclient.hf.streaming.files.rearrange import arrangement
from kvclient.hf.streaming.mover import DiskMover, pages
from kvclient.hf.streaming.residency import NO_VOCABULARY, PARTS, Plan, StreamingConfig, Vocabulary, plan
from kvclient.hf.streaming.scheduler import Mover, Scheduler
from kvclient.hf.streaming.slots import Slot
from kvclient.hf.streaming.vocabulary import ROWS_BYTES, StreamedEmbedding, StreamedHead, digest

ROLES = {"embedding": "input", "head": "output"}
Place = tuple[torch.nn.Module, str, torch.Tensor]
# Not an attribute of the model: what a module has is part of its identity.
_streams: weakref.WeakKeyDictionary[torch.nn.Module, Streams] = weakref.WeakKeyDictionary()


class StreamingCausalLM:
    """from_pretrained() gives the stock model of transformers; its layers are read as they are asked for."""

    @staticmethod
    def from_pretrained(
        directory: str | Path, config: StreamingConfig | None = None, *, dtype: torch.dtype | None = None,
        mover: Callable[[Arrangement], Mover] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> torch.nn.Module:  # fmt: skip
        """The model of a directory or hub id with safetensors, AWQ or plain, in eval mode, on the CPU. dtype:
        what it computes in; progress: told of layers rearranged and of all, the first time. Raises
        InvalidArgument for a directory or a memory that will not do, StreamingFailed for a disk that refuses.
        """
        home = directory_of(directory)
        config = config or StreamingConfig()
        model, group = _empty(home, dtype)
        found = tensors(home, sources(home))
        names = _vocabulary(model, found)
        arranged = arrangement(home, tuple(dict.fromkeys(names.values())), progress)
        sizes = [{name: part.piece.length for name, part in layer.items()} for layer in arranged.layers]
        tables = {role: arranged.tables[name] for role, name in names.items()}
        others = {name: source for name, source in found.items() if split(name) is None}
        outside = sum(
            math.prod(tensor.shape) * model.dtype.itemsize
            for name, tensor in others.items()
            if name not in names.values()
        )
        chosen = plan(config, sizes, outside, _sizes(tables))
        streamed = {names[role] for role in chosen.vocabulary}
        rest = {name: _read(source) for name, source in others.items() if name not in streamed}
        layers = model.get_submodule(arranged.prefix)
        if len(layers) != len(arranged.layers):
            raise InvalidArgument(
                f"{home.name} has {len(arranged.layers)} layers, its configuration {len(layers)}"
            )
        for layer, parts in zip(layers, arranged.layers, strict=True):
            _pack(layer, parts, group, model.dtype)
        _fill_outside(model, rest, arranged.prefix, home.name, streamed)
        moved = (mover or (lambda files: DiskMover(files.path)))(arranged)
        tables = {role: tables[role] for role in chosen.vocabulary}
        _streams[model] = Streams(model, layers, arranged, tables, chosen, config, moved)
        if (home / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(home, local_files_only=True)
        return model.eval()


def streams_of(model: torch.nn.Module) -> Streams | None:
    """None: a model whose weights are all in memory for good."""
    return _streams.get(model)


def streaming_stats(model: torch.nn.Module) -> dict[str, Any]:
    """Bytes and loads so far, how often a layer was there already, seconds waited for each, bytes a pass."""
    streams = _streams[model]
    found = {"bytes_held": streams.plan.bytes, "bytes_per_pass": streams.plan.moved}
    if (scheduler := streams.scheduler) is None:
        return found
    return {
        **found, "bytes": scheduler.bytes, "loads": scheduler.loads, "hits": scheduler.hits,
        "retries": scheduler.retries, "filling_s": scheduler.filling_s, "waited_s": dict(scheduler.waited_s),
    }  # fmt: skip


class Streams:
    """The streamed layers of one model: their slots, and whose weights point into which."""

    def __init__(
        self, model: Any, layers: Any, arranged: Arrangement, tables: dict[str, Table], chosen: Plan,
        config: StreamingConfig, mover: Mover,
    ) -> None:  # fmt: skip
        self.plan, self._dtype, self._layers, self._prefix = chosen, model.dtype, layers, arranged.prefix
        self._mover, self._model = mover, weakref.ref(model)
        self.digests: list[Any] | None = None  # of the streamed weights, once somebody has computed them
        self._holding = threading.local()
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()
        self._streamed: dict[int, list[Part]] = {}
        self.scheduler: Scheduler | None = None
        for number, (layer, parts) in enumerate(zip(layers, arranged.layers, strict=True)):
            for name in PARTS:
                if name in chosen.streamed[number]:
                    self._streamed.setdefault(number, []).append(parts[name])
                    _leave(layer, parts[name])
                else:
                    held = pages(parts[name].piece.length)
                    mover.fill(number, [parts[name].piece], held)
                    _set(_places(layer, parts[name], held, self._dtype))
        self._tables = tables
        self.embedding = self._head = None
        if "embedding" in tables:
            embedding = model.get_input_embeddings()
            self.embedding = StreamedEmbedding(embedding, tables["embedding"], mover, len(layers))
        pieces = {n: tuple(part.piece for part in parts) for n, parts in self._streamed.items()}
        if "head" in tables:
            self._head = StreamedHead(model.get_output_embeddings(), tables["head"], len(layers))
            pieces |= self._head.pieces()
        if pieces:
            self.scheduler = Scheduler(mover, pieces, config.n_staging_slots, config.ahead)
            if self._head is not None:
                self._head.follow(self.scheduler)
            for number in self._streamed:
                layers[number].register_forward_pre_hook(self._before(number))
                layers[number].register_forward_hook(self._after(number), always_call=True)
        elif self.embedding is None:
            mover.close()

    def close(self) -> None:
        """Ends the reading; the model cannot be called any more."""
        if self.scheduler is not None:
            self.scheduler.close()
        elif self.embedding is not None:
            self._mover.close()

    def moving(self) -> dict[str, tuple[torch.nn.Module, str]]:
        """Of each weight that has memory only while its layer computes, by its name: module and attribute."""
        found = {}
        for number, parts in self._streamed.items():
            for stored in (stored for part in parts for stored in part.tensors):
                owner, _, attribute = stored.name.rpartition(".")
                module = self._layers[number].get_submodule(owner)
                found[f"{self._prefix}.{number}.{stored.name}"] = module, attribute
        model = self._model()
        for role in self._tables if model is not None else ():
            module = getattr(model, f"get_{ROLES[role]}_embeddings")()
            found[f"{_name_of(model, module)}.weight"] = module, "weight"
        return found

    def digested_tables(self) -> Iterator[tuple[str, str, list[int], bytes]]:
        """Of each streamed matrix of the vocabulary its name, type, shape and the SHA-256 of its bytes."""
        digests: dict[str, bytes] = {}
        for role, table in self._tables.items():
            module = getattr(self._model(), f"get_{ROLES[role]}_embeddings")()
            if table.name not in digests:
                digests[table.name] = digest(table, self._mover, len(self._layers))
            name = f"{_name_of(self._model(), module)}.weight"
            yield name, f"torch.{table.dtype}", list(table.shape), digests[table.name]

    def filled_layers(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Each streamed layer in turn, with its name and its weights, until the next is asked for."""
        for number in self._streamed:
            layer = self._layers[number]
            self._before(number)(layer, None)
            try:
                yield f"{self._prefix}.{number}", layer
            finally:
                self._after(number)(layer, None, None)

    def _before(self, number: int) -> Callable[..., None]:
        def before(layer: torch.nn.Module, _args: Any) -> None:
            assert self.scheduler is not None
            with contextlib.ExitStack() as stack:
                slot = stack.enter_context(self.scheduler.holding(number))
                with self._lock:
                    if not self._users.get(number):
                        self._point(number, layer, slot)
                    self._users[number] = self._users.get(number, 0) + 1
                held = self._holding.__dict__.setdefault("stacks", {})
                held.setdefault(number, []).append(stack.pop_all())  # else: the slot is free again

        return before

    def _after(self, number: int) -> Callable[..., None]:
        """Also after an exception in the layer."""

        def after(layer: torch.nn.Module, _args: Any, _out: Any) -> None:
            stacks = self._holding.__dict__.get("stacks", {}).get(number)
            if not stacks:
                return  # the layer was never given its weights
            with self._lock:
                self._users[number] -= 1
                if not self._users[number]:
                    for part in self._streamed[number]:
                        _leave(layer, part)
            stacks.pop().close()

        return after

    def _point(self, number: int, layer: torch.nn.Module, slot: Slot) -> None:
        at = 0
        for part in self._streamed[number]:
            _set(_places(layer, part, slot.memory[at : at + part.piece.length], self._dtype))
            at += part.piece.length


def _places(layer: torch.nn.Module, part: Part, memory: memoryview, dtype: torch.dtype) -> Iterator[Place]:
    for stored in part.tensors:
        owner, _, attribute = stored.name.rpartition(".")
        yield layer.get_submodule(owner), attribute, _tensor(stored, memory, dtype, attribute)


def _tensor(stored: Stored, memory: memoryview, dtype: torch.dtype, attribute: str) -> torch.Tensor:
    kind = getattr(torch, stored.dtype)
    if not stored.length:
        return torch.empty(stored.shape, dtype=kind)
    count = stored.length // kind.itemsize
    found = torch.frombuffer(memory, dtype=kind, count=count, offset=stored.offset).view(stored.shape)
    return found.to(dtype) if found.is_floating_point() and attribute != "scales" else found


def _set(places: Iterator[Place]) -> None:
    for module, attribute, tensor in places:
        if attribute in module._buffers:
            module._buffers[attribute] = tensor
        else:
            module._parameters[attribute] = torch.nn.Parameter(tensor, requires_grad=False)


def _leave(layer: torch.nn.Module, part: Part) -> None:
    """The part's weights have no memory from here on."""
    for stored in part.tensors:
        owner, _, attribute = stored.name.rpartition(".")
        module = layer.get_submodule(owner)
        empty = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")
        _set(iter([(module, attribute, empty)]))


# ---------------------------------------------------------------- the model's frame


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters that are made here have no memory; buffers, which hold what no checkpoint has, do."""
    register = torch.nn.Module.register_parameter

    def registered(module: torch.nn.Module, name: str, value: torch.nn.Parameter | None) -> None:
        register(module, name, value)
        if value is not None:
            module._parameters[name] = torch.nn.Parameter(value.to("meta"), requires_grad=False)

    torch.nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _empty(home: Path, dtype: torch.dtype | None) -> tuple[Any, int | None]:
    """The model without weights, and the size of AWQ's groups if it is packed."""
    config = AutoConfig.from_pretrained(home, local_files_only=True)
    group = None
    if (quantisation := getattr(config, "quantization_config", None)) is not None:
        group, _ = _group_of(quantisation)
        del config.quantization_config
    with _without_memory():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
    if quantisation is not None:
        model.config.quantization_config = quantisation
    return model, group


def _pack(layer: torch.nn.Module, parts: dict[str, Part], group: int | None, dtype: torch.dtype) -> None:
    """Linear layers that the checkpoint has packed become AwqLinear; a tensor without a place is an error."""
    stored = {tensor.name: tensor for part in parts.values() for tensor in part.tensors}
    for name in [key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")]:
        linear = layer.get_submodule(name)
        if group is None or not isinstance(linear, torch.nn.Linear):
            raise InvalidArgument(f"the checkpoint quantises {name}, a {type(linear).__name__}")
        bias = linear.bias is not None
        with torch.device("meta"):  # all layers' words at one time would be the whole model
            packed = AwqLinear(linear.in_features, linear.out_features, group, bias, dtype)
        if f"{name}.qzeros" not in stored:
            packed.qzeros = torch.full(packed.qzeros.shape, MIDDLE, dtype=packed.qzeros.dtype)
        owner, _, attribute = name.rpartition(".")
        setattr(layer.get_submodule(owner), attribute, packed)
    state = layer.state_dict()
    made = {name for name in state if name.endswith(".qzeros") and name not in stored}
    wrong = [n for n, t in stored.items() if n not in state or tuple(state[n].shape) != t.shape]
    if lost := sorted(set(state) - set(stored) - made) + sorted(wrong):
        raise InvalidArgument(f"tensors without a counterpart, or of another shape: {', '.join(lost[:5])}")


def _name_of(model: Any, module: torch.nn.Module) -> str:
    return next(name for name, named in model.named_modules() if named is module)


def _vocabulary(model: Any, found: dict[str, Source]) -> dict[str, str]:
    """The tensors that hold the embedding and the head, by role; none if not both can be streamed: as
    ordinary modules, in the type that they are computed in.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not torch.nn.Embedding or type(head) is not torch.nn.Linear:
        return {}
    names = {"embedding": f"{_name_of(model, embedding)}.weight", "head": f"{_name_of(model, head)}.weight"}
    if embedding.weight is head.weight or getattr(model.config, "tie_word_embeddings", False):
        names["head"] = names["embedding"]
    for name in names.values():
        if name not in found or getattr(torch, found[name].dtype) != model.dtype:
            return {}
    return names


def _sizes(tables: dict[str, Table]) -> Vocabulary:
    if not tables:
        return NO_VOCABULARY
    embedding, head = tables["embedding"], tables["head"]
    piece = max(piece.length for piece in head.pieces)
    return Vocabulary(embedding.length, head.length, embedding is head, piece, ROWS_BYTES + BLOCK_BYTES)


def _read(source: Source) -> torch.Tensor:
    """In memory that torch aligned: a product's last bits depend on it."""
    found = torch.empty(source.shape, dtype=getattr(torch, source.dtype))
    if source.length:
        source.read_into(memoryview(found.view(-1).view(torch.uint8).numpy()))
    return found


def _fill_outside(
    model: Any, rest: dict[str, torch.Tensor], prefix: str, name: str, streamed: set[str]
) -> None:
    held = {key: value for key, value in model.state_dict().items() if not key.startswith(f"{prefix}.")}
    if lost := sorted(k for k, value in rest.items() if k not in held or held[k].shape != value.shape):
        raise InvalidArgument(f"{name}: tensors without a counterpart: {', '.join(lost[:5])}")
    for key, value in rest.items():
        owner, _, attribute = key.rpartition(".")
        _set(iter([(model.get_submodule(owner), attribute, value.to(model.dtype))]))
    model.tie_weights()
    if lost := [
        key for key, value in model.named_parameters()
        if value.is_meta and not key.startswith(f"{prefix}.") and key not in streamed
    ]:  # fmt: skip
        raise InvalidArgument(f"{name} has no {', '.join(lost[:5])}")
