"""The gRPC services (Store, Admin, Transfer) and what bounds their calls.

Never decides about blocks: it decodes, asks the native store, encodes.
"""
