"""Bytes on a GPU: chunks from pinned memory to usable, dequantising alone, AWQ layers. Rows of bench.gpu.

Owns the problems: 32k tokens of 8 KV heads of 128 in int8 and int4, blocks of 128 tokens, in a shared map as
the daemon has them; AWQ layers of 64 MB and more. Invariant: what is called usable was waited for.
"""

from __future__ import annotations

import functools
import mmap
import os
from typing import Any

import numpy as np
import torch

from bench.gpu import clock as gpu_clock
from kvclient.hf import awq
from kvclient.kernels import contract, cuda
from kvclient.kernels.host_memory import HostMemory
from kvclient.kernels.transfer import Copies, Transfer, extent

LAYERS, TOKENS, BLOCK, KV_HEADS, HEAD_DIM = 12, 32_768, 128, 8, 128
BLOCKS = TOKENS // BLOCK
AWQ_SHAPES = [(8192, 16_384), (8192, 81_920)]


class Pool:
    """A shared map of blocks, each with its layers: codes of K and V, scales and zeros of K, of V."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        codes, k_scales, v_scales = (
            KV_HEADS * BLOCK * HEAD_DIM * bits // 8,
            KV_HEADS * HEAD_DIM * 2,
            KV_HEADS * BLOCK * 2,
        )
        self.parts = (codes, codes, k_scales, k_scales, v_scales, v_scales)  # bytes of a layer of a block
        self.layer_bytes = sum(self.parts)
        size = BLOCKS * LAYERS * self.layer_bytes
        self._file = os.memfd_create("pool")
        os.ftruncate(self._file, size)
        self.memory = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        block = np.random.default_rng(0).integers(0, 256, 2 * codes, np.uint8)
        scales = np.full((k_scales + v_scales), 0.01, np.float16)  # scales, then zeros: all 0.01
        layer = np.concatenate([block, scales.view(np.uint8)])
        self.memory.reshape(-1, self.layer_bytes)[:] = layer
        self.staged = torch.empty(
            LAYERS, BLOCKS, self.layer_bytes, dtype=torch.uint8, device=gpu_clock.DEVICE
        )
        self.cache = torch.empty(
            LAYERS, 2, KV_HEADS, TOKENS, HEAD_DIM, dtype=torch.bfloat16, device=gpu_clock.DEVICE
        )
        self.turn = torch.ones(2, HEAD_DIM // 2, device=gpu_clock.DEVICE)
        self.tables = [self._table(layer) for layer in range(LAYERS)]
        step = BLOCK * HEAD_DIM * 2
        self.places = torch.arange(0, BLOCKS * step, step, device=gpu_clock.DEVICE)

    def copies(self, layer: int) -> Copies:
        steps = np.arange(BLOCKS, dtype=np.int64) * self.layer_bytes
        start = extent(self.memory)[0] + layer * self.layer_bytes
        sizes = np.full(BLOCKS, self.layer_bytes, np.int64)
        return Copies(self.staged[layer].data_ptr() + steps, start + steps * LAYERS, sizes)

    def bring(self, layer: int) -> None:
        """Dequantised, turned and scattered: one launch."""
        keys, values = self.cache[layer]
        cuda.load(keys, values, self.tables[layer], self.places, BLOCK, HEAD_DIM, False)

    def _table(self, layer: int) -> torch.Tensor:
        width = HEAD_DIM * self.bits // 8
        shapes = ((KV_HEADS, BLOCK, width),) * 2 + ((KV_HEADS, 1, HEAD_DIM),) * 2 + ((KV_HEADS, BLOCK),) * 2
        structs = []
        for block in self.staged[layer]:
            split = [part.reshape(shape) for part, shape in zip(self._parts_of(block), shapes, strict=True)]
            keys, values = (split[0], split[2], split[3]), (split[1], split[4], split[5])
            structs.append(cuda.segment(keys, values, BLOCK, turn=self.turn, bits=self.bits))
        return cuda.table(structs, self.staged.device)

    def _parts_of(self, block: torch.Tensor) -> list[torch.Tensor]:
        codes, scales = block.split(self.parts)[:2], block.split(self.parts)[2:]
        return [*codes, *(part.view(torch.float16) for part in scales)]

    def close(self) -> None:
        del self.memory
        os.close(self._file)


class Arrival:
    """Every layer of a pool sent and brought: usable when it returns."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.host, self.bounced_bytes = pool, HostMemory(), 0

    def __call__(self) -> None:
        moving, stream = Transfer(self.host, LAYERS), gpu_clock.own_stream()
        moving.start(self.pool.copies)
        for layer in range(LAYERS):
            moving.wait(layer, stream)
            self.pool.bring(layer)
        gpu_clock.settle()
        self.bounced_bytes = moving.bounced_bytes
        moving.close()


def load(ceilings: dict[str, float]) -> dict[str, Any]:
    return {f"int{bits}": load_in(bits, ceilings) for bits in (8, 4)}


def load_in(bits: int, ceilings: dict[str, float]) -> dict[str, Any]:
    pool = Pool(bits)
    ours = Arrival(pool)
    pinned, flat = gpu_clock.pinned_bytes(pool.memory.nbytes), pool.staged.flatten()
    took = gpu_clock.walled({"ours": ours, "one copy": lambda: flat.copy_(pinned, non_blocking=True)})
    calls = [functools.partial(pool.bring, layer) for layer in range(LAYERS)]
    kernel = gpu_clock.timed({"bring": calls})["bring"]
    moved = BLOCKS * pool.layer_bytes + pool.cache[0].nbytes  # of a layer: read and written
    result = {
        "us": took["ours"],
        "copy_us": took["one copy"],
        "of_pinned_copy": took["one copy"] / took["ours"],
        "bf16_bytes_s": pool.cache.nbytes / took["ours"] * 1e6,
        "bounced_bytes": ours.bounced_bytes,
        "refused": ours.host.why_not,
        "kernel_us_a_layer": kernel,
        "kernel_of_copy": moved / kernel * 1e6 / ceilings["copy_bytes_s"],
    }
    ours.host.close()
    pool.close()
    torch.cuda.empty_cache()
    return result


def packed_layer(
    inputs: int, outputs: int, group: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    words = torch.randint(
        -(1 << 31), 1 << 31, (inputs, outputs // 8), dtype=torch.int32, device=gpu_clock.DEVICE
    )
    zeros = torch.randint(
        -(1 << 31), 1 << 31, (inputs // group, outputs // 8), dtype=torch.int32, device=gpu_clock.DEVICE
    )
    scales = torch.rand(inputs // group, outputs, device=gpu_clock.DEVICE).mul_(0.01).half()
    return cuda.awq_repack(words, group), zeros, scales


def awq_few_rows(ceilings: dict[str, float]) -> dict[str, Any]:
    """Weights of 67 and 336 MB; cuBLAS in fp16 has four times the bytes to read."""
    result: dict[str, Any] = {}
    for inputs, outputs in AWQ_SHAPES:
        count = inputs * outputs // 2
        sets = [packed_layer(inputs, outputs) for _ in range(min(4, gpu_clock.sets_for(count)))]
        dense = torch.randn(outputs, inputs, device=gpu_clock.DEVICE, dtype=torch.float16) * 0.01
        for rows in (1, 4, 16, 64):
            x = torch.randn(rows, inputs, device=gpu_clock.DEVICE, dtype=torch.float16)
            took = gpu_clock.timed(
                {
                    "ours": [lambda w=w, x=x: cuda.awq_multiply(x, *w, None, 128) for w in sets],
                    "cublas fp16": [lambda x=x, dense=dense: torch.nn.functional.linear(x, dense)],
                }
            )
            read = sum(part.nbytes for part in sets[0])
            rate = read / took["ours"] * 1e6
            result[f"{inputs}x{outputs}, {rows} rows"] = {
                "us": took["ours"],
                "cublas_us": took["cublas fp16"],
                "bytes_s": rate,
                "of_copy": rate / ceilings["copy_bytes_s"],
            }
        del sets, dense
        torch.cuda.empty_cache()
    return result


def awq_many_rows(_ceilings: dict[str, float]) -> dict[str, Any]:

    (inputs, outputs), result = AWQ_SHAPES[0], {}
    before = awq.fallbacks()
    layer = awq.AwqLinear(inputs, outputs, 128, False, torch.float16).to(gpu_clock.DEVICE)
    weights = packed_layer(inputs, outputs)
    layer.qweight, layer.qzeros, layer.scales = weights
    layer._in_lanes = True
    dense = cuda.awq_dequantise(*weights, 128, torch.float16)
    with torch.no_grad():
        for rows in (256, 1024, 4096):
            x = torch.randn(rows, inputs, device=gpu_clock.DEVICE, dtype=torch.float16)
            took = gpu_clock.timed(
                {
                    "ours": [lambda x=x: layer(x)],
                    "cublas fp16": [lambda x=x: torch.nn.functional.linear(x, dense)],
                }
            )
            result[f"{rows} rows"] = {
                "us": took["ours"],
                "cublas_us": took["cublas fp16"],
                "of_cublas": took["cublas fp16"] / took["ours"],
            }
    assert awq.fallbacks() == before, awq.fallbacks()
    return result


def quantise(ceilings: dict[str, float]) -> dict[str, Any]:
    """K and V of a layer of 32k tokens, into int8 and int4; the deviation of blocks from fresh K and V."""
    keys = torch.randn(BLOCKS * KV_HEADS, BLOCK, HEAD_DIM, device=gpu_clock.DEVICE, dtype=torch.bfloat16)
    result = {}
    for bits in (8, 4):
        for name, group in (("K", 128), ("V", 0)):
            us = gpu_clock.timed({"ours": [lambda b=bits, g=group: cuda.quantise(keys, b, g)]})["ours"]
            moved = keys.nbytes * (1 + bits / 16)
            result[f"int{bits} {name}"] = {"us": us, "of_copy": moved / us * 1e6 / ceilings["copy_bytes_s"]}
    pool = Pool(8)
    columns = torch.arange(0, TOKENS, BLOCK, device=gpu_clock.DEVICE)
    k, v = pool.cache[0].normal_()
    us = gpu_clock.timed(
        {"ours": [lambda: cuda.score(k, v, pool.tables[0], columns, BLOCK, HEAD_DIM, False)]}
    )["ours"]
    moved = 2 * k.nbytes + BLOCKS * pool.layer_bytes
    result["score int8"] = {"us": us, "of_read": moved / us * 1e6 / ceilings["read_bytes_s"]}
    pool.close()
    return result


def no_wgmma(_ceilings: dict[str, float]) -> dict[str, Any]:
    raise contract.Unsupported("there is no wgmma kernel yet")
