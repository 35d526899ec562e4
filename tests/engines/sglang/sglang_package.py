"""SGLang's storage modules out of its unpacked wheel: the engine itself needs a GPU, these need torch only.

Owns the two packages that stand in for what imports half of SGLang. Imported by tests, in whose process it
stays. Host pools have the face that SGLang's have, and its arrangement page_first.
"""

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import CACHE

HOME = CACHE / "sglang" / "sglang"


def _stand_in(name: str, path: Path, **content: object) -> None:
    module = types.ModuleType(name)
    module.__path__ = [str(path)]
    vars(module).update(content)
    sys.modules[name] = module


def load() -> types.SimpleNamespace:
    """storage: sglang's hicache_storage, factory: its backend_factory."""
    if not HOME.exists():
        pytest.skip(f"sglang is not in {CACHE}; `make engines` puts it there")
    if "sglang" not in sys.modules:
        _stand_in("sglang", HOME)
        _stand_in("sglang.srt.utils", HOME / "srt" / "utils")
        _stand_in("sglang.srt.utils.common", HOME / "srt" / "utils", human_readable_int=int)
    return types.SimpleNamespace(
        storage=importlib.import_module("sglang.srt.mem_cache.hicache_storage"),
        factory=importlib.import_module("sglang.srt.mem_cache.storage.backend_factory"),
    )


class HostPool:
    """K and V of all layers, page after page: [2, tokens, layers, heads, head_dim]."""

    def __init__(
        self, pages: int = 64, page_size: int = 4, layers: int = 3, heads: int = 2, head_dim: int = 8,
        dtype: torch.dtype = torch.bfloat16, in_place: bool = True,
    ) -> None:  # fmt: skip
        self.page_size, self.dtype, self.layout = page_size, dtype, "page_first"
        self.head_num, self.head_dim = heads, head_dim
        self.start_layer, self.end_layer, self.storage_format_tag, self.dcp_size = 0, layers, None, 1
        self.kv_buffer = torch.zeros((2, pages * page_size, layers, heads, head_dim), dtype=dtype)
        self._free = list(range(pages))
        if not in_place:
            self.get_page_buffer_meta = self._nowhere

    def _nowhere(self, _indices: torch.Tensor) -> None:
        raise ValueError("Unsupported layout: layer_first")

    def alloc(self, tokens: int) -> torch.Tensor | None:
        count = tokens // self.page_size
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return self.slots(taken)

    def free(self, indices: torch.Tensor) -> None:
        self._free.extend((indices[:: self.page_size] // self.page_size).tolist())

    def slots(self, pages: list[int]) -> torch.Tensor:
        return torch.cat([torch.arange(p * self.page_size, (p + 1) * self.page_size) for p in pages])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        token, pointers = self.kv_buffer[0, 0].numel() * self.dtype.itemsize, []
        for start in indices.tolist()[:: self.page_size]:
            pointers += [
                self.kv_buffer[0].data_ptr() + start * token,
                self.kv_buffer[1].data_ptr() + start * token,
            ]
        return pointers, [token * self.page_size] * len(pointers)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[:, index : index + self.page_size]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.kv_buffer[:, : self.page_size]).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.kv_buffer[:, index : index + self.page_size] = data_page.view(
            self.kv_buffer[:, : self.page_size].shape
        )

    def fill(self, page: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        target = self.kv_buffer[:, page * self.page_size : (page + 1) * self.page_size]
        target.copy_(torch.randn(target.shape, generator=generator))

    def page(self, page: int) -> torch.Tensor:
        return self.kv_buffer[:, page * self.page_size : (page + 1) * self.page_size].clone()


def config(sglang, extra, **change):
    fields = {
        "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
        "model_name": "org/model",
    }  # fmt: skip
    return sglang.storage.HiCacheStorageConfig(**{**fields, **change}, extra_config=extra)


def hashes(start, count):
    return [f"{start + i:064x}" for i in range(count)]
