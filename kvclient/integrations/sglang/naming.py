"""Under which keys SGLang's pages lie in the store: its own page hashes beneath all else that shapes a page.

Owns the list of what must match; never touches a page. Invariant: two engines share a key only if everything
that the list names is equal; what SGLang tells a storage backend has neither the weights nor the KV's type in
it, so those come from elsewhere, and there is no default. What differs misses; it never collides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvclient._core import DerivedKeys
from kvclient.errors import InvalidArgument

VERSION = 3  # of this list, of how a key is made and of how a page lies in a block
AMBIGUOUS = ("uint8", "int8")  # how several types of eight bits are kept
SHAPE = ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")


def kv_dtype_of(pool: Any, options: dict[str, Any]) -> str:
    """The type of the KV's elements, e.g. "bfloat16". Raises InvalidArgument if nobody says."""
    if kv_dtype := options["kv_dtype"]:
        return str(kv_dtype)
    dtype = getattr(pool, "dtype", None)
    name = str(dtype).removeprefix("torch.")
    if dtype is None or name in AMBIGUOUS:
        raise InvalidArgument(
            f'the host pool keeps KV as {name}, which says not which type it is; say "kv_dtype"'
        )
    return name


class PageNames:
    """The store's keys of one pool's pages."""

    def __init__(
        self, config: Any, served: Mapping[str, Any], pool: Any, kv_dtype: str, name: str, form: str,
        sizes: Sequence[int],
    ) -> None:  # fmt: skip
        """`config` is SGLang's HiCacheStorageConfig; `served`: the weights, and what else the engine has that
        shapes KV; `form`: how a page's bytes are taken out of its pool."""
        if config.should_split_heads:
            raise InvalidArgument("tp_lcm_size above tp_size splits pages by heads, which is not supported")
        replicated = config.is_mla_model and name != "mamba"  # then every tensor rank has the same page
        fields = {
            "version": VERSION,
            "served": dict(served),
            "model_name": str(config.model_name),
            "dtype": kv_dtype,
            "pool": name,
            "pool_dtype": str(getattr(pool, "dtype", None)),
            "layout": str(getattr(pool, "layout", None)),
            "format_tag": getattr(pool, "storage_format_tag", None),
            "page_tokens": getattr(pool, "page_size", None),
            "layers": [getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)],
            "shape": [getattr(pool, part, None) for part in SHAPE],
            "form": form,
            "sizes": list(sizes),
            "tensor": None if replicated else [config.tp_rank, config.tp_size],
            "pipeline": [config.pp_rank, config.pp_size],
            "attention_context": [config.attn_cp_rank, config.attn_cp_size],
            "decode_context": [config.dcp_rank, config.dcp_size, config.logical_page_size],
        }
        text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
        self.identity = hashlib.sha256(text.encode()).digest()
        self._derived = DerivedKeys(self.identity)

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        """The store's keys of pages by SGLang's hashes."""
        return self._derived.listed([page.encode() for page in hashes])
