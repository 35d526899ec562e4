"""What the names that KVBoost has are called here, for who brings a program along.

Owns the names. Never accepts one of them: it says the new one, before a model is loaded. Invariant: whatever
it names exists (tests/unit/house/test_feature_names.py looks up what docs/reuse.md says of the same names).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from kvclient.errors import InvalidArgument

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

OPTIONS = {  # of an engine, and of a call
    "model_name": "name_or_path=",
    "strict": "self_test=",
    "streaming_config": "streaming=",
    "awq_path": "name_or_path=",
    "speculative_config": "speculation= of generate()",
    "tree_speculative_config": "speculation= of generate()",
    "kv_cache_bits": 'codec="int8" or "int4"',
    "chunk_size": "block_tokens=",
    "chunk_boundary_window": "chunker=",
    "max_cache_bytes": 'client="memory" with memory_bytes=, or the daemon\'s --memory',
    "max_chunks": "the daemon's --max-blocks",
    "disk_cache_dir": 'client="memory" with disk_dir=, or the daemon\'s --disk',
    "recompute_strategy": "repair=",
    "recompute_overlap": "kvclient.hf.Repair(seam_tokens=) as repair=",
    "recompute_ratio": "kvclient.hf.Repair(ratio=) as repair=",
    "recency_window_chunks": "pin() and unpin()",
    "overlap_k": "overlap_tokens=",
    "sink_tokens": "kvclient.hf.Repair(sink_tokens=) as repair=",
    "position_offset": "before=, the text it will stand behind",
    "torch_dtype": "dtype=",
    "do_sample": "temperature= above 0",
    "stop_strings": "stop=",
}
METHODS = {
    "warm_chunks": "warm()",
    "cache_manager": "kv.client",
    "speculative_stats": "Result.speculation",
    "generate_many": "generate_batch()",
    "verify_correctness": "verify()",
    "cache_stats": "stats()",
    "reset_cache": "reset()",
    "pin_content": "pin()",
    "unpin_content": "unpin()",
    "check_model_compatibility": "kvclient.hf.self_test()",
    "paged_stats": "kv.paged_stats()",
}
RESULTS = {
    "generated_tokens": "tokens",
    "first_token_logits": "first_logits",
    "output_text": "text",
    "output_tokens": "tokens",
    "ttft_ms": "ttft_s, in seconds",
    "total_ms": "total_s, in seconds",
    "total_time_ms": "total_s, in seconds",
    "tokens_per_sec": "tokens_per_s",
    "kv_reuse_ratio": "reuse_ratio",
    "cached_tokens": "report.reused_tokens",
    "prompt_length": "prompt_tokens",
}
WARMED = {
    "chunks_stored": "blocks",
    "token_count": "tokens",
    "chunk_size": "block_tokens",
    "chunk_boundary_aligned": "aligned",
    "partial_tail_tokens": "tail_tokens",
    "alignment_warning": "note",
}


def saying_new_names(
    *others: Callable[..., object],
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """A method that first says what its arguments are called here. others: who takes some of them too."""

    def around(method: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        known = {name for taker in (method, *others) for name in inspect.signature(taker).parameters}

        @functools.wraps(method)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            _check(kwargs, known)
            return method(*args, **kwargs)

        return call

    return around


def _check(names: Iterable[str], known: set[str]) -> None:
    """Raises InvalidArgument for a name that is another one here, TypeError for one that nobody has."""
    for name in names:
        if name not in known and name in OPTIONS:
            raise InvalidArgument(f"{name}=: here it is {OPTIONS[name]}")
        if name not in known:
            raise TypeError(f"there is no option {name}=")


def missing(kind: str, names: dict[str, str], name: str) -> AttributeError:
    """What to raise for an attribute that is not there."""
    here = f"; here it is {names[name]}" if name in names else ""
    return AttributeError(f"{kind} has no {name!r}{here}")
