"""A stock generate() on one host uses what another computed, and answers the same; what no host has costs an
answer, not a wait.

Tiny random models, two daemons.
"""

import os
import signal

import pytest
import torch

import kvclient.hf
from tests.hf.zoo import build, generate, prompt
from tests.hosts.hosts import Hosts

BLOCK = 16


@pytest.fixture
def pair(daemon, tmp_path, wait_until):
    """Two attachments, each of a model of its own on a host of its own; `.hosts`."""
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    with hosts[0].connect() as here, hosts[1].connect() as there:
        models = [build("llama"), build("llama")]
        made = [
            kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)
            for model, client in zip(models, (here, there), strict=True)
        ]
        for kv, model in zip(made, models, strict=True):
            kv.hosts, kv.its_model = hosts, model
        yield made
        for kv in made:
            kv.detach()


def test_what_one_host_computed_is_a_hit_of_a_stock_generate_on_the_other(pair):
    ids = prompt(100)
    tokens, logits, _ = generate(build("llama"), ids)
    generate(pair[0].its_model, ids)
    assert pair[0].last.reused_tokens == 0 and pair[0].client.peers_up() == 1
    found, found_logits, _ = generate(pair[1].its_model, ids)
    assert torch.equal(found, tokens) and torch.allclose(found_logits, logits, atol=1e-5)
    assert pair[1].last.reused_tokens == 96
    assert pair[1].last.reused_by_tier == {"shm": 0, "disk": 0, "peer": 96}
    generate(pair[1].its_model, ids)
    assert pair[1].last.reused_by_tier == {"shm": 96, "disk": 0, "peer": 0}


def test_half_here_and_half_there(pair):
    """The first half was fetched before, not computed: how long computing takes here is not known, so the
    wait does not depend on how busy this machine is."""
    ids = prompt(100)
    generate(pair[0].its_model, ids[:, :50])
    generate(pair[1].its_model, ids[:, :50])
    generate(pair[0].its_model, ids)
    tokens, *_ = generate(build("llama"), ids)
    found, *_ = generate(pair[1].its_model, ids)
    assert torch.equal(found, tokens)
    assert pair[1].last.reused_by_tier == {"shm": 48, "disk": 0, "peer": 48}


@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_a_host_that_is_gone_costs_no_answer(pair, wait_until, fate):
    ids, hosts = prompt(100), pair[0].hosts
    generate(pair[0].its_model, ids)
    tokens, *_ = generate(build("llama"), ids)
    if fate == "killed":
        hosts[0].kill()
    else:
        os.kill(hosts[0].pid, signal.SIGSTOP)
    try:
        found, *_ = generate(pair[1].its_model, ids)
        assert torch.equal(found, tokens) and pair[1].last.reused_tokens == 0
        wait_until(lambda: pair[1].client.peers_up() == 0, "nobody is left to ask")
    finally:
        if fate == "frozen":
            os.kill(hosts[0].pid, signal.SIGCONT)
