"""Whether vLLM has KV of eight bits on this machine. Owns nothing. Invariant: what it leaves out is said."""

from pathlib import Path

WHY = "vLLM's KV of eight bits wants AVX-512 on a CPU, which this one has not"


def there() -> bool:
    """Without asking vLLM, whose start takes seconds."""
    return "avx512f" in Path("/proc/cpuinfo").read_text().split()
