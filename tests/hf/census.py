"""Every causal language model of transformers that builds tiny, and what kvclient.hf does with it.

    python -m tests.hf.census            # prints the table of docs/models.md
    python -m tests.hf.census gemma2     # of these only

A model is built from its own configuration with small numbers in it, or from that of tests/hf/zoo.py. Plain
generate() is compared with a first call (cold), the same again (warm), an answer that goes on, rows with
padding, beams, and samples from a seed: greedy in fp32, tokens for equality. test_census.py runs a part.
"""

# ruff: noqa: C408
from __future__ import annotations

import sys
import warnings

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvclient
import kvclient.hf
from tests.hf.census_sizes import LACKING, SIZES
from tests.hf.zoo import (
    COMPRESSED,
    INDEXED,
    LATENT,
    MOVED,
    RECURRENT,
    REFUSED,
    SERVED,
    VOCAB,
    WINDOWED,
    build,
    generate,
    prompt,
)

BLOCK, NEW = 8, 12
# Around the borders of blocks, of states, and of the zoo's windows of 16.
LENGTHS = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 40, 45)
MOST_PARAMETERS = 40_000_000
COLUMNS = ("cold", "warm", "goes on", "padded", "beams", "samples")
TINY = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.15, max_position_embeddings=512, bos_token_id=1,
    eos_token_id=2, pad_token_id=0, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1, n_shared_experts=1,
    hidden_dim=48, d_model=48, n_layers=2, n_heads=4, n_layer=2, n_head=4, n_embd=48, num_layers=2,
    ffn_dim=64, word_embed_proj_dim=48, n_positions=512,
)  # fmt: skip


def known_types() -> list[str]:
    """Those that a causal language model of transformers is for, by its type."""
    return sorted(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING)


def zoo() -> dict[str, str]:
    """The zoo's models by the name of their class: where there are several, the first."""
    out: dict[str, str] = {}
    every = {**SERVED, **LATENT, **INDEXED, **COMPRESSED, **WINDOWED, **RECURRENT, **MOVED, **REFUSED}
    for name, (_, model_name, *_) in every.items():
        out.setdefault(model_name, name)
    return out


def _numbers(kind: str) -> dict:
    small = {**TINY, **SIZES.get(kind, {})}
    return {name: value for name, value in small.items() if name not in LACKING.get(kind, ())}


def tiny(kind: str):
    """A model of that type, or why none is built."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    name = name if isinstance(name, str) else name[0]
    if name in zoo():
        return build(zoo()[name])
    try:
        made = getattr(transformers, name).config_class or CONFIG_MAPPING[kind]  # of the text part alone
        config = made(**_numbers(kind))
        with torch.device("meta"):
            size = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
        if size > MOST_PARAMETERS:
            return f"{size / 1e6:.0f} M parameters with small numbers in it"
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).float().eval()
        model.generation_config.eos_token_id = None
        generate(model, prompt(9), 2)
    except Exception as error:  # whatever a configuration that does not fit raises
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return model


def examine(model) -> dict[str, str]:
    """Per column "equal", "differs", or why the store had no part in it; or {"refused": the reason}."""
    with kvclient.InMemoryClient(256 << 20) as client:
        try:
            kv = kvclient.hf.attach(model, client, block_tokens=BLOCK)
        except kvclient.hf.Refused as refused:
            return {"refused": str(refused).removeprefix(type(model).__name__).lstrip(" :")}
        with kv:
            return _examined(model, kv)


def _examined(model, kv) -> dict[str, str]:
    def same(ids, reused: bool, **options) -> str:
        answers = []
        for bypass in (True, False):
            torch.manual_seed(5)
            with kv.bypass(bypass, bypass):
                call = dict(max_new_tokens=NEW, pad_token_id=0, do_sample=False, eos_token_id=None)
                call.update({"attention_mask": torch.ones_like(ids)}, **options)
                answers.append(model.generate(ids, **call))
        if kv.last.bypassed:
            return f"without the store ({kv.last.bypassed})"
        if reused and not kv.last.reused_tokens:
            return "nothing reused"
        return "equal" if torch.equal(*answers) else "differs"

    out = {}
    texts = [prompt(length, seed=length) for length in LENGTHS]
    for column in ("cold", "warm"):
        out[column] = _worst([same(ids, column == "warm" and ids.shape[1] > BLOCK) for ids in texts])
    answered, *_ = generate(model, texts[-1], NEW)
    out["goes on"] = same(torch.cat([answered, prompt(5, seed=4)], dim=1), True)
    ids = torch.cat([prompt(45, seed=45), prompt(45, seed=2)])
    mask = torch.ones_like(ids)
    ids[1, :21] = mask[1, :21] = 0
    out["padded"] = _worst([same(ids, again, attention_mask=mask) for again in (False, True)])
    out["beams"] = same(texts[-1], True, num_beams=2)
    out["samples"] = same(texts[-1], True, do_sample=True, top_k=5, num_return_sequences=2)
    return out


def _worst(found: list[str]) -> str:
    return next((word for word in found if word != "equal"), "equal")


def what(model) -> str:
    """What is stored of it, in a few words."""
    kv = kvclient.hf.model.structure.check_structure(model)
    words = []
    if kv.rates:
        words.append("entries of tokens")
    elif kv.main is None or kv.main:
        words.append("latent" if kv.latent else "all tokens")
    windows = sorted({group.window for group in kv.groups if group.window})
    words += [f"windows of {', '.join(map(str, windows))}"] if windows else []
    words += ["indexer keys"] if kv.beside and not kv.rates else []
    words += ["states"] if kv.states else []
    return " and ".join(words) or "other shapes"


def table(kinds: list[str]):
    """Lines of the table; those that are refused or not built come last."""
    yield f"| type (transformers {transformers.__version__}) | stored | {' | '.join(COLUMNS)} |"
    yield f"|---|---|{'---|' * len(COLUMNS)}"
    others = []
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = tiny(kind)
            if model is None or isinstance(model, str):
                others.append(f"- `{kind}`: not built: {model}")
                continue
            try:
                found = examine(model)
            except Exception as error:
                found = {"refused": f"an error: {error!r:.90}"}
        if "refused" in found:
            others.append(f"- `{kind}`: refused: {found['refused'][:150]}")
        else:
            yield f"| {kind} | {what(model)} | {' | '.join(found[column] for column in COLUMNS)} |"
    yield ""
    yield from others


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for line in table(sys.argv[1:] or known_types()):
        print(line, flush=True)
