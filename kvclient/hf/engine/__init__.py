"""Engine, conversations and windows: what serves a text rather than a tensor.
"""
