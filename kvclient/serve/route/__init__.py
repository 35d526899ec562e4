"""`kvclient-serve route`: one address in front of several servers.

command → app (HTTP) → servers (health, connections) → balance and prefixes (who is asked; pure). It knows no
model, no tokenizer and no torch: texts are compared as bytes.
"""
