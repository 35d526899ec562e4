"""Several tokens per pass: a draft is guessed, one pass of the model looks at all of it, what is right stays.

    speculation = Speculation()  # guesses from the text itself; Speculation(draft=small_model) asks a model
    model.generate(**inputs, custom_generate=speculation)
    print(speculation.last.tokens_per_pass, speculation.last.speed_up)

Owns drafts, their acceptance and the decode loop around them. Never changes what is answered: greedy answers
are those of plain decoding, sampled ones have its distribution. For a loop of one's own: a Session drafts,
score() computes, match() or reject() accept, keep() leaves the cache with what was accepted.
"""

from kvclient.hf.speculation.acceptance import Path, match, reject
from kvclient.hf.speculation.cache import keep, score
from kvclient.hf.speculation.decode import Speculation, SpeculationReport
from kvclient.hf.speculation.draft import NOTHING, Draft, Drafter, Session
from kvclient.hf.speculation.draft_model import DraftModel
from kvclient.hf.speculation.lookup import PromptLookup

__all__ = [
    "NOTHING",
    "Draft",
    "DraftModel",
    "Drafter",
    "Path",
    "PromptLookup",
    "Session",
    "Speculation",
    "SpeculationReport",
    "keep",
    "match",
    "reject",
    "score",
]
