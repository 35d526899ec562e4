"""An OpenAI-compatible server over a Hugging Face model and the store.

HTTP (app, schema, errors) → scheduler (who is computed next) → loop (the one thread that owns the model) →
kvclient.hf. Never listens beyond loopback unasked, never logs a prompt.
"""
