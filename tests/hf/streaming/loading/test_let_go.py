"""Proves that a model which nobody holds any more gives its threads, its slots and its files back, as one
that is closed does.

Method: tiny checkpoints; the threads of this process by their names, and the files that it has open, are
waited for, with a deadline.
"""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from kvclient.errors import Closed
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, close_streams
from kvclient.hf.streaming.registry import streams_of

PROMPT = torch.arange(1, 25)[None]
NAMES = ("kvclient-streaming", "kvclient-loading", "kvclient-closing")
DEADLINE_S = 60.0


def held(home):
    """Threads that read, and files of the checkpoint that are open."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith(NAMES)]
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:  # the one that lists them
            continue
    return threads + [link for link in links if link.startswith(str(home))]


def wait_until_free(home):
    ends = time.monotonic() + DEADLINE_S
    while left := held(home):
        assert time.monotonic() < ends, left
        gc.collect()
        threading.Event().wait(0.01)


def opened(home, residency="full_stream", **more):
    return StreamingCausalLM.from_pretrained(home, StreamingConfig(residency=residency, **more))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"rearrange": False}, {"residency": "partial_resident", "keep_first_k": 2, "keep_last_k": 1}]
)
def test_a_model_that_nobody_holds_gives_everything_back(checkpoint, more, called):
    """Its threads held its slots and files for as long as the process lived."""
    wait_until_free(checkpoint)
    model = opened(checkpoint, **more)
    if called:
        with torch.inference_mode():
            model(PROMPT)
    assert held(checkpoint)
    del model
    wait_until_free(checkpoint)


def test_a_part_of_a_model_keeps_what_it_is_read_by(checkpoint):
    with torch.inference_mode():
        model = opened(checkpoint)
        want = model.model(PROMPT).last_hidden_state
        body = model.model
        del model
        gc.collect()
        assert torch.equal(body(PROMPT).last_hidden_state, want)
    del body
    wait_until_free(checkpoint)


def test_slots_give_their_pages_back_when_they_are_closed_though_the_model_is_held(checkpoint):
    """The one that is computed from does behind its layer, whose numbers are right."""
    model = opened(checkpoint)
    with torch.inference_mode():
        want = model(PROMPT).logits
    close_streams(model)
    assert not any(any(slot.memory) for slot in streams_of(model).scheduler.slots)
    model = opened(checkpoint)
    streams_of(model).settle()  # else the head comes through slots, behind the last layer
    slots, seen = streams_of(model).scheduler.slots, []
    last = model.model.layers[-1]

    def closing(*_):
        close_streams(model)
        seen.append([any(slot.memory) for slot in slots])

    last.register_forward_pre_hook(closing)
    with torch.inference_mode():
        assert torch.equal(model(PROMPT).logits, want)
    assert seen[0].count(True) == 1 and not any(any(slot.memory) for slot in slots)


def test_a_model_that_is_closed_gives_everything_back_and_says_so(checkpoint):
    model = opened(checkpoint)
    for _ in range(2):
        close_streams(model)
        assert not held(checkpoint)
    with pytest.raises(Closed, match="streams were closed"), torch.inference_mode():
        model(PROMPT)
    with pytest.raises(KeyError):
        close_streams(torch.nn.Linear(1, 1))
