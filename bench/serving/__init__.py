"""Measures OpenAI-compatible servers side by side: `python -m bench.serving` (docs/serving.md).

__main__ → own, contenders (installed, processes) → loads → client. Nothing here is imported by the packages.
"""
