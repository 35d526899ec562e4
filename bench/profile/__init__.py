"""Small measurements behind single decisions in docs/design.md; `python -m bench` measures the whole."""
