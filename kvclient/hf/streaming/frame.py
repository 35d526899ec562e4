"""The model without its layers' weights: modules without memory, packed layers, what lies outside.

Owns what is made once, before anything is streamed. Never reads a layer. Invariant: a tensor without a place,
or a place without a tensor, is an error that names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, initialization

from kvclient.errors import InvalidArgument
from kvclient.hf.attention import one_row
from kvclient.hf.awq import head
from kvclient.hf.awq.checkpoint import MIDDLE, _group_of
from kvclient.hf.awq.linear import AwqLinear
from kvclient.hf.streaming.files.headers import Source
from kvclient.hf.streaming.files.index import BLOCK_BYTES, Part, Table
from kvclient.hf.streaming.residency import NO_VOCABULARY, Vocabulary
from kvclient.hf.streaming.weights.places import put
from kvclient.hf.streaming.weights.vocabulary import ROWS_BYTES, input_of

# A head of 1 GB is copied into memory that is touched for the first time: two processors are not too many.
READERS, PIECE_BYTES = 2, 32 << 20
PLANNED_ROWS = ROWS_BYTES + BLOCK_BYTES  # of an embedding that is read row by row


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


def empty_model(home: Path, dtype: torch.dtype | None) -> tuple[Any, int | None]:
    """The model without weights, and the size of AWQ's groups if it is packed. Raises InvalidArgument for a
    configuration that is no causal model's.
    """
    config = AutoConfig.from_pretrained(home, local_files_only=True)
    group = None
    if (quantisation := getattr(config, "quantization_config", None)) is not None:
        group, _ = _group_of(quantisation)
        del config.quantization_config
    with _without_memory(), initialization.no_init_weights():  # they are drawn for nothing
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            name = config.model_type
            raise InvalidArgument(f"{home}: model_type={name!r} is no causal language model") from error
    if quantisation is not None:
        model.config.quantization_config = quantisation
        one_row.give(model)
        head.give(model)
    return model, group


def check_words(model: Any, found: dict[str, Source]) -> None:
    """Raises InvalidArgument that names a packed layer's tensor which is lost, or of another type than the
    kernels read: before anything is written. Zero points may be lost only where the configuration says so.
    """
    if (quantisation := getattr(model.config, "quantization_config", None)) is None:
        return
    _, zeros = _group_of(quantisation)
    wanted = {"qweight": "int32", "scales": "float16"} | ({"qzeros": "int32"} if zeros else {})
    for name in sorted(key.removesuffix(".qweight") for key in found if key.endswith(".qweight")):
        for part, kind in wanted.items():
            source = found.get(f"{name}.{part}")
            if source is None or source.dtype != kind:
                what = "missing" if source is None else source.dtype
                raise InvalidArgument(f"{name}.{part} is {what}; expected {kind}")


def pack(layer: torch.nn.Module, parts: dict[str, Part], group: int | None, dtype: torch.dtype) -> None:
    """Linear layers that the checkpoint has packed become AwqLinear; a tensor without a place is an error.
    Raises InvalidArgument for it, and for a packed layer that is no Linear.
    """
    stored = {tensor.name: tensor for part in parts.values() for tensor in part.tensors}
    for name in [key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")]:
        try:
            linear: Any = layer.get_submodule(name)
        except AttributeError:
            raise InvalidArgument(f"the checkpoint quantises {name}, which the model has not") from None
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


def name_of(model: Any, module: torch.nn.Module) -> str:
    """The module's dotted name in the model."""
    return next(name for name, named in model.named_modules() if named is module)


def vocabulary_of(model: Any, found: dict[str, Source]) -> dict[str, str]:
    """The tensors that hold the embedding and the head, by role; none if not both can be streamed: as
    ordinary modules, in the type that they are computed in.
    """
    embedding, last = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not torch.nn.Embedding or type(last) not in (torch.nn.Linear, head.Head):
        return {}
    names = {"embedding": f"{name_of(model, embedding)}.weight", "head": f"{name_of(model, last)}.weight"}
    if embedding.weight is last.weight or getattr(model.config, "tie_word_embeddings", False):
        names["head"] = names["embedding"]
    for name in names.values():
        if name not in found or getattr(torch, found[name].dtype) != model.dtype:
            return {}
    return names


def keep_head_in_place(model: Any) -> None:
    """torch lays a whole matrix out anew, each time, for rows that do not lie one behind the other, as the
    last one of a prompt: the head gets rows that do. (contiguous() takes a single one for such, torch's
    product goes by its strides.)
    """
    last = model.get_output_embeddings()
    if type(last) in (torch.nn.Linear, head.Head):
        rows = torch.contiguous_format

        def laid(_module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            return (input_of(args, kwargs).clone(memory_format=rows),), {}

        last.register_forward_pre_hook(laid, with_kwargs=True)


def sizes(tables: dict[str, Table]) -> Vocabulary:
    """Bytes of the embedding and the head, and of what is held of them while they are streamed."""
    if not tables:
        return NO_VOCABULARY
    embedding, last = tables["embedding"], tables["head"]
    piece = max(piece.length for piece in last.pieces)
    return Vocabulary(embedding.length, last.length, embedding is last, piece, ROWS_BYTES + BLOCK_BYTES)


def read(source: Source) -> torch.Tensor:
    """The tensor, of the source's shape, in memory that torch aligned: a product's last bits depend on it."""
    found = torch.empty(source.shape, dtype=getattr(torch, source.dtype))
    if source.length:
        memory = memoryview(found.view(-1).view(torch.uint8).numpy())
        starts = range(0, source.length, PIECE_BYTES)
        with ThreadPoolExecutor(min(READERS, len(starts)), "kvclient-reading") as readers:
            list(readers.map(lambda at: source.read_into(memory[at : at + PIECE_BYTES], at), starts))
    return found


def fill_outside(
    model: Any, rest: dict[str, torch.Tensor], prefix: str, name: str, streamed: set[str]
) -> None:
    """Raises InvalidArgument where tensors and places do not match by name and shape."""
    held = {key: value for key, value in model.state_dict().items() if not key.startswith(f"{prefix}.")}
    if lost := sorted(k for k, value in rest.items() if k not in held or held[k].shape != value.shape):
        raise InvalidArgument(f"{name}: tensors without a counterpart: {', '.join(lost[:5])}")
    for key, value in rest.items():
        owner, _, attribute = key.rpartition(".")
        put(iter([(model.get_submodule(owner), attribute, value.to(model.dtype))]))
    model.tie_weights()
    if lost := [
        key for key, value in model.named_parameters()
        if value.is_meta and not key.startswith(f"{prefix}.") and key not in streamed
    ]:  # fmt: skip
        raise InvalidArgument(f"{name} has no {', '.join(lost[:5])}")
