"""The layers of a cache: dense, in place, on a device, paged, and such as a recorded step can replay.

Never decides which; request.cache_layers does.
"""
