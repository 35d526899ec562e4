"""One streamed chat request, timed where its bytes arrive.

Owns the clock of each answer. Never retries. Times are those of a client: from before the request is sent.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 900.0


@dataclass
class Answer:
    """status 0: no answer came; `error` says why. gaps_s: between the pieces behind the first."""

    status: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    cached: int | None = None
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""


def chat(url: str, model: str, prompt: str, new_tokens: int, **more: Any) -> Answer:
    """Greedy, streamed, with usage."""
    body = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": new_tokens,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    where, out = urlsplit(url), Answer()
    began = last = time.perf_counter()
    try:
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection) as link:
            headers = {"Content-Type": "application/json"}
            link.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = link.getresponse()
            out.status = answer.status
            if answer.status != 200:
                out.error = answer.read(300).decode(errors="replace")
                return out
            for line in answer:
                chunk = _event(line)
                if chunk is None:
                    continue
                usage = chunk.get("usage")
                if usage:
                    out.tokens = usage.get("completion_tokens") or out.tokens
                    out.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                told = chunk.get("choices") or []
                ended = any(c.get("finish_reason") for c in told) and not out.ttft_s  # an empty answer
                if not ended and not any((c.get("delta") or {}).get("content") for c in told):
                    continue
                now = time.perf_counter()
                if out.ttft_s:
                    out.gaps_s.append(now - last)
                out.ttft_s, last = out.ttft_s or now - began, now
    except (OSError, http.client.HTTPException) as error:
        out.status, out.error = 0, f"{type(error).__name__}: {error}"
    out.total_s = time.perf_counter() - began
    out.tokens = out.tokens or len(out.gaps_s) + 1
    return out


def _event(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
        return None
    return json.loads(line[5:])
