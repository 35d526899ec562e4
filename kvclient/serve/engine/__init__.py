"""The engine: loop (the one thread that owns the model) → job (a request, and what it hears) → sampling,
text, windowed.
"""
