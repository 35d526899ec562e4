"""Prefill here, decode elsewhere: prompts whose KV is being computed are handed to another process, on this
host or on one whose daemon is this one's peer.

    handoff = kv.handoff(**inputs)                         # at once: the prefill goes on in a thread
    text = other.resume(Handoff.from_json(sent), max_new_tokens=50)

Reading order: prompts (what is said of them), first_token (what the prefill ends with), prefill (how it
begins), thread (where they are computed), lease (for how long what was computed is held for who decodes),
resume.
"""
