"""Between a request and the store: claims, loads, saves, and the format of a block.
"""
