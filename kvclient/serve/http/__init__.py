"""HTTP: app (routes, bounds) → answers (shapes, streams) → asking (a request as jobs) → schema, template,
grammar, tools, reasoning.
"""
