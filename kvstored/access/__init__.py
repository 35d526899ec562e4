"""Who may do what: tenants and their lists, the two gRPC doors, the proxy that asks the kernel who
calls, and quotas.

Never changes a block; the session socket has its own rule (native/core/session/session_access.h).
"""
