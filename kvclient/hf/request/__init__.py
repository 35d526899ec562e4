"""One generate() call: what is looked up, loaded, computed and published, in order.

Never touches a model that was not attached.
"""
