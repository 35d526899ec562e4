"""The token that a prefill ends with, so that who decodes computes nothing of the prompt again.

Owns how it is chosen and when it may be used. Never has logits travel. Invariant: it is used only where the
options are such that stock generate() of the same prompts would have chosen it, and goes on the same behind
it: anything else computes the prompt's last token once more.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvclient.errors import InvalidArgument

INPUTS = {"input_ids", "attention_mask"}
# What changes no choice of a token, or none that is not seen here.
BESIDE = {
    "max_new_tokens", "max_length", "max_time", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache",
    "decoder_start_token_id", "return_dict_in_generate", "transformers_version", "_from_model_config",
    "cache_implementation", "prefill_chunk_size",
}  # fmt: skip
OF_THE_TEXT = {"repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias"}
OF_ANY = {"suppress_tokens", "renormalize_logits", *OF_THE_TEXT}
OF_SAMPLING = {
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"
}
MOST_STATE_BYTES = 1 << 16


def digest_of(rows: Sequence[Sequence[int]]) -> bytes:
    """32 bytes that name prompts of these token ids, in this order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little") + np.asarray(row, np.int64).tobytes())
    return digest.digest()


@dataclass(frozen=True)
class First:
    """The first token of each row, and where the sampler stands behind it."""

    prompts: bytes  # digest_of() the rows it is of
    tokens: tuple[int, ...]
    how: str  # choice_of() the options that it was chosen by
    sampler: bytes = b""  # state of torch's generator on the CPU; empty: greedy

    def said(self) -> dict[str, Any]:
        """For JSON: of(said()) is equal."""
        state = base64.b64encode(self.sampler).decode()
        return {"prompts": self.prompts.hex(), "tokens": self.tokens, "how": self.how, "sampler": state}

    @classmethod
    def of(cls, said: Any) -> First:
        """Raises InvalidArgument for what said() cannot have said."""
        try:
            prompts, state = bytes.fromhex(said["prompts"]), base64.b64decode(said["sampler"], validate=True)
            tokens, how = tuple(said["tokens"]), said["how"]
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgument(f"no handoff: its first token: {error!r:.200}") from None
        right = len(prompts) == 32 and len(state) <= MOST_STATE_BYTES and isinstance(how, str)
        if not right or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
            raise InvalidArgument("no handoff: its first token is none")
        return cls(prompts, tokens, how, state)


def choice_of(model: torch.nn.Module, options: dict[str, Any], rows: Sequence[Sequence[int]]) -> str | None:
    """Names what decides on these prompts' first token. None: something that is not looked through here, such
    as beams, processors and criteria of the caller's, or scores that are to be returned."""
    config: Any = copy.deepcopy(model.generation_config)
    unknown = config.update(**{name: value for name, value in options.items() if name not in INPUTS})
    if unknown or "generation_config" in options:
        return None
    told = {name: value for name, value in config.to_diff_dict().items() if name not in BESIDE}
    sampled = bool(told.pop("do_sample", False))
    if told.pop("num_beams", 1) not in (None, 1) or told.pop("num_return_sequences", 1) not in (None, 1):
        return None
    of_sampling = {name: told.pop(name) for name in OF_SAMPLING & set(told)}
    told = {name: value for name, value in told.items() if value}
    ragged = len({len(row) for row in rows}) > 1  # the text has padding, which is another elsewhere
    if set(told) - (OF_ANY - OF_THE_TEXT if ragged else OF_ANY):
        return None
    return json.dumps([sampled, told, of_sampling if sampled else {}], sort_keys=True, default=repr)


def sampler_state(model: torch.nn.Module, how: str | None) -> torch.Tensor | None:
    """Where torch's generator stands, if it is drawn from. None: it is not, or not of the CPU. As torch has
    it, uint8 [bytes].
    """
    drawn = how is not None and json.loads(how)[0] and model.device.type == "cpu"
    return torch.get_rng_state() if drawn else None


def chosen(
    out: Any, how: str | None, rows: Sequence[Sequence[int]], state: torch.Tensor | None
) -> First | None:
    """Of a generate() of one token with scores; drawn from a generator that stood at `state`. state: as
    sampler_state() gives it, of that shape.
    """
    if how is None:
        return None
    if not json.loads(how)[0]:
        return First(digest_of(rows), tuple(out.sequences[:, -1].tolist()), how)
    if state is None:
        return None
    generator = torch.Generator()
    generator.set_state(state)
    drawn = torch.multinomial(torch.softmax(out.scores[0], -1), 1, generator=generator)
    behind = bytes(generator.get_state().tolist())
    return First(digest_of(rows), tuple(drawn[:, 0].tolist()), how, behind)


@dataclass(frozen=True)
class Continued:
    """Prompts with their first tokens, and how generate() goes on."""

    inputs: dict[str, torch.Tensor]
    options: dict[str, Any]
    ended: bool  # nothing is to be generated behind the first tokens
    sampler: torch.Tensor | None

    def begin(self) -> None:
        """Takes the sampler's state over, as the prefiller left it."""
        if self.sampler is not None:
            torch.set_rng_state(self.sampler)


def continued(
    model: torch.nn.Module, first: First | None, rows: Sequence[Sequence[int]],
    inputs: dict[str, torch.Tensor], options: dict[str, Any],
) -> Continued | None:  # fmt: skip
    """generate() of the prompts as one behind their first tokens. None where it would not be the same.
    inputs: [batch, columns].
    """
    if first is None or len(first.tokens) != len(rows) or first.prompts != digest_of(rows):
        return None
    config = model.generation_config
    most = options.get("max_new_tokens", config.max_new_tokens)
    if type(most) is not int or most < 1 or first.how != choice_of(model, options, rows):
        return None
    if bool(first.sampler) != json.loads(first.how)[0] or (first.sampler and model.device.type != "cpu"):
        return None
    eos = options.get("eos_token_id", config.eos_token_id)
    ends = set(eos) if isinstance(eos, (list, tuple)) else {eos}
    at_end = [token in ends for token in first.tokens]
    ended = all(at_end) or most == 1
    if (any(at_end) and not ended) or (ended and options.get("return_dict_in_generate")):
        return None  # a row that has ended beside others that go on; a cache to be returned
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    column = torch.tensor(first.tokens, device=ids.device)[:, None]
    longer = {
        "input_ids": torch.cat([ids, column], 1),
        "attention_mask": torch.cat([mask, torch.ones_like(column)], 1),
    }
    state = torch.frombuffer(bytearray(first.sampler), dtype=torch.uint8) if first.sampler else None
    return Continued(longer, {**options, "max_new_tokens": most - 1}, ended, state)
