"""attach(): the hooks on a model, the proof that they change nothing, and what is measured of it.
"""
