"""kvclient.hf: a stock transformers model.generate() over the store.

    kv = kvclient.hf.attach(model, client)
    model.generate(**inputs)            # looks up, loads, generates, publishes
    kv.last.reused_tokens, kv.last.ttft_s
    with kv.bypass(write=False): …      # without reading from the store; kv.bypass(): nor writing to it
    print(kv.verify())                  # how far each way of reuse takes this model from a cold run
    kv.calibrate()                      # …and, if near enough, also reuse what stands inside a prompt
    kv.detach()

The only package that imports transformers. Reading order: attachment (the hooks) → request (the steps of one
call) → connector (look-up, claim, load, save) → cache (the layers) → attention (the kernels); decoding (each
new token), model (what is known of a model), proof (the self-test, verify, calibrate), reuse (what is no
prefix), handoff (to another host), engine (conversations, windows), awq (packed weights). call says what one
call was asked for and what it did.
"""

import importlib.util
from typing import Any

if importlib.util.find_spec("kvclient._core") is not None:
    for _needed in ("torch", "transformers"):
        if importlib.util.find_spec(_needed) is None:
            hint = f"kvclient.hf needs {_needed}: pip install torch transformers"
            raise ModuleNotFoundError(hint, name=_needed)

    from kvclient.hf.attachment.attach import Attachment, attach, self_test
    from kvclient.hf.call import Report
    from kvclient.hf.engine.conversation import Conversation, Turn
    from kvclient.hf.engine.engine import Engine
    from kvclient.hf.engine.results import Result, Warmed
    from kvclient.hf.engine.window import Held, Window
    from kvclient.hf.handoff.prompts import Handoff
    from kvclient.hf.model.structure import Refused
    from kvclient.hf.proof.self_test import Verdict
    from kvclient.hf.reuse.quality.verify import Outcome, Verification
    from kvclient.hf.reuse.repair import Repair
else:  # a bare checkout on a machine with a GPU: its attention and its AWQ layers need no store

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(name)
        raise ImportError(f"kvclient.hf.{name} needs the client's native module: `make build`")


__all__ = [
    "Attachment",
    "Conversation",
    "Engine",
    "Handoff",
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
