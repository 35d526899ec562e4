"""The README's dozen lines. Beside `kvstored serve --dir ~/.kvstored`, run it twice:
`KVSTORED_DIR=~/.kvstored python examples/quickstart.py`.
"""

import pathlib

import model as example_model
import transformers

import kvclient

path = example_model.ensure()
model = transformers.AutoModelForCausalLM.from_pretrained(path)
tokenizer = transformers.AutoTokenizer.from_pretrained(path)

client = kvclient.connect()  # the daemon of $KVSTORED_DIR, /run/kvstored or $XDG_RUNTIME_DIR/kvstored
kv = kvclient.hf.attach(model, client)  # from here on generate() looks up, loads and publishes

prompt = pathlib.Path(kvclient.__file__).read_text() * 4 + "\nIn one sentence, this library"
inputs = tokenizer(prompt, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=20, do_sample=False)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
if kv.last.bypassed:
    raise SystemExit(f"the store was left out: {kv.last.bypassed}: {kv.last.bypass_detail}")
print(f"{kv.last.reused_tokens} of {kv.last.prompt_tokens} tokens reused, first token {kv.last.ttft_s:.3f} s")
