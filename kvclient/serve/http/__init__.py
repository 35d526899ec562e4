"""HTTP: app (routes, bounds) → answers (shapes, streams) → asking (a request as jobs) → schema, grammar,
tools, reasoning.
"""
