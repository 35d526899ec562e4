"""kvclient.hf: a stock transformers model.generate() over the store.

    kv = kvclient.hf.attach(model, client)
    model.generate(**inputs)            # looks up, loads, generates, publishes
    kv.last.reused_tokens, kv.last.ttft_s
    with kv.bypass(write=False): …      # without reading from the store; kv.bypass(): nor writing to it
    print(kv.verify())                  # how far each way of reuse takes this model from a cold run
    kv.calibrate()                      # …and, if near enough, also reuse what stands inside a prompt
    kv.detach()

The only package that imports transformers. Reading order: attach (the hooks) → request (the steps of one
call) → prompt, prefix, filling, cache, publish (what the steps use) → structure, dimensions, selftest (what
is known of a model). Inside a prompt: repair (which tokens) → blend (the pass) → rope (moving keys) → inside
(the proof) → verify, trials, calibration (the numbers). Long conversations: window (the cache) →
conversation_state (in the store) → conversation (the turns).
"""

import importlib.util
from typing import Any

if importlib.util.find_spec("kvclient._core") is not None:
    for _needed in ("torch", "transformers"):
        if importlib.util.find_spec(_needed) is None:
            hint = f"kvclient.hf needs {_needed}: pip install 'kvstored[hf]'"
            raise ModuleNotFoundError(hint, name=_needed)

    from kvclient.hf.attach import Attachment, attach
    from kvclient.hf.conversation import Conversation, Turn
    from kvclient.hf.engine import Engine, Result, Warmed
    from kvclient.hf.repair import Repair
    from kvclient.hf.report import Report
    from kvclient.hf.selftest import Verdict, self_test
    from kvclient.hf.structure import Refused
    from kvclient.hf.verify import Outcome, Verification
    from kvclient.hf.window import Held, Window
else:  # a bare checkout on a machine with a GPU: its attention and its AWQ layers need no store

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(name)
        raise ImportError(f"kvclient.hf.{name} needs the client's native module: `make build`")


__all__ = [
    "Attachment",
    "Conversation",
    "Engine",
    "Held",
    "Outcome",
    "Refused",
    "Repair",
    "Report",
    "Result",
    "Turn",
    "Verdict",
    "Verification",
    "Warmed",
    "Window",
    "attach",
    "self_test",
]
