"""What is known of a model: its structure, its identity, its changes, its positions.

Never runs it.
"""
