"""An OpenAI-compatible server over a Hugging Face model and the store.

http (what is asked, how it is answered) → engine (the one thread that owns the model) → scheduler (who is
computed next; pure) → kvclient.hf. Never listens beyond loopback unasked, never logs a prompt.
"""
