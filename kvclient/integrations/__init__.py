"""Inference engines on kvstored without a fork of theirs: a package for each, loaded by the engine's own
plug-in way.

Owns nothing itself. Importing it imports no engine.
"""
