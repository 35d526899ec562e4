"""An AWQ checkpoint's directory as a causal model whose linear layers stay packed.

Owns reading and checking the files. Never unpickles, never asks a hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvclient.errors import InvalidArgument
from kvclient.hf.attention import one_row
from kvclient.hf.awq import head
from kvclient.hf.awq.linear import AwqLinear
from kvclient.hf.awq.packing import BITS

MIDDLE = 0x88888888 - (1 << 32)  # eight zero points of 8


def from_pretrained(directory: str | Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The causal model of an AWQ checkpoint in eval mode, on the CPU. Raises InvalidArgument with what is
    wrong with it. dtype: what it computes in; default: the configuration's.
    """
    home = Path(directory)
    if not (home / "config.json").is_file():
        raise InvalidArgument(f"{home} is no directory with a config.json")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidArgument(f"dtype={dtype!r}; it must be a floating point torch.dtype")
    config = AutoConfig.from_pretrained(home, local_files_only=True)
    quantisation = getattr(config, "quantization_config", None)
    group, zeros = _group_of(quantisation)
    del config.quantization_config
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    tensors = _tensors(home)
    if not zeros:
        _add_zeros(tensors)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.quantization_config = quantisation  # save_pretrained() then writes such a checkpoint again
    _replace(model, tensors, group, dtype)
    _check_places(model, tensors)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    parameters = model.state_dict(keep_vars=True)
    filled = {parameters[name].data_ptr() for name in tensors if name in parameters}
    # What is tied the checkpoint has elsewhere.
    tied = {name for name in missing if parameters[name].data_ptr() in filled}
    if lost := sorted(set(missing) - tied) + sorted(unexpected):
        raise InvalidArgument(f"{home.name}: tensors without a counterpart: {', '.join(lost[:5])}")
    if (home / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(home, local_files_only=True)
    for module in model.modules():
        if isinstance(module, AwqLinear):
            module.into_panels()
    one_row.give(model)
    head.give(model)
    return model.eval()


def _group_of(quantisation: Any) -> tuple[int, bool]:
    """The group's size, and whether there are zero points; without them all are 8, the middle."""
    found = quantisation if isinstance(quantisation, dict) else getattr(quantisation, "to_dict", dict)()
    method, version = found.get("quant_method"), str(found.get("version", "gemm")).lower()
    if str(method).lower().rpartition(".")[2] != "awq":
        raise InvalidArgument(f"quant_method={method!r}; this reads awq")
    if version != "gemm" or found.get("bits") != BITS:
        kind = f"version={version!r}, bits={found.get('bits')!r}"
        raise InvalidArgument(f"AWQ {kind}; this reads version 'gemm', 4 bits")
    group = found.get("group_size")
    if not isinstance(group, int) or group <= 0:
        raise InvalidArgument(f"group_size={group!r}; it must be a positive number")
    return group, bool(found.get("zero_point", True))


def _tensors(home: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index, names = home / "model.safetensors.index.json", ["model.safetensors"]
    if index.exists():
        try:
            names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"{index.name} is no index of a checkpoint: {error!r}") from error
    if any(Path(name).name != name for name in names):
        raise InvalidArgument(f"{index.name} names a file outside of the checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            tensors.update(load_file(home / name))
        except (OSError, SafetensorError) as error:
            raise InvalidArgument(f"{name} cannot be read: {error}") from error
    return tensors


def _add_zeros(tensors: dict[str, torch.Tensor]) -> None:
    for name in [key.removesuffix(".scales") for key in tensors if key.endswith(".scales")]:
        groups, outputs = tensors[f"{name}.scales"].shape
        middle = torch.full((groups, outputs // 8), MIDDLE, dtype=torch.int32)
        tensors.setdefault(f"{name}.qzeros", middle)


def _check_places(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Raises InvalidArgument for a tensor that its place in the model cannot hold: another shape, or whole
    numbers for fractions, which loading would convert.
    """
    for name, place in model.state_dict().items():
        found = tensors.get(name)
        if found is None:
            continue
        if found.shape != place.shape or found.is_floating_point() != place.is_floating_point():
            what = f"{found.dtype}{list(found.shape)}"
            raise InvalidArgument(f"{name} is {what}; expected {place.dtype}{list(place.shape)}")


def _replace(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], group: int, dtype: torch.dtype
) -> None:
    for name in [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]:
        owner, _, attribute = name.rpartition(".")
        try:
            parent = model.get_submodule(owner)
            linear = getattr(parent, attribute)
        except AttributeError:
            raise InvalidArgument(f"the checkpoint quantises {name}, which the model has not") from None
        if not isinstance(linear, torch.nn.Linear):
            raise InvalidArgument(f"the checkpoint quantises {name}, a {type(linear).__name__}")
        packed = AwqLinear(linear.in_features, linear.out_features, group, linear.bias is not None, dtype)
        for part in ("qweight", "qzeros", "scales"):
            found, wanted = tensors.get(f"{name}.{part}"), getattr(packed, part)
            if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
                what = "missing" if found is None else f"{found.dtype}{list(found.shape)}"
                raise InvalidArgument(f"{name}.{part} is {what}; expected {wanted.dtype}{list(wanted.shape)}")
        if not bool((scales := tensors[f"{name}.scales"]).isfinite().all()):
            wrong = float(scales[~scales.isfinite()][0])
            raise InvalidArgument(f"{name}.scales has {wrong}; all must be finite")
        setattr(parent, attribute, packed)
