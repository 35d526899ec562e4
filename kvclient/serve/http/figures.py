"""The server's figures as Prometheus reads them.

Owns their names. Never a prompt, a key or a salt in one.
"""

from __future__ import annotations

from typing import Any

GAUGES = (
    "requests_waiting", "requests_running", "held_tokens", "kv_bytes_per_token",
    "kv_bytes_per_token_uncoded",
)  # fmt: skip


def prometheus(stats: dict[str, Any]) -> str:
    """The figures as Prometheus reads them."""
    lines = []
    for name, value in stats.items():
        if isinstance(value, int | float):
            kind = "gauge" if name in GAUGES else "counter"
            lines += [f"# TYPE kvclient_serve_{name} {kind}", f"kvclient_serve_{name} {value}"]
    for name, value in stats.get("kv", {}).items():
        if isinstance(value, int | float):
            lines += [f"# TYPE kvclient_hf_{name}_total counter", f"kvclient_hf_{name}_total {value}"]
    return "\n".join(lines) + "\n"
