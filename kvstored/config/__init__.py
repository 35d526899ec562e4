"""Configuration: its fields, units, namespaces, and where each value came from.

Never opens a socket or a segment; a value is checked before anything is made of it.
"""
