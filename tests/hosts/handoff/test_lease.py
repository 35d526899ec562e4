"""A prefiller holds what it computed for who decodes it, and no longer: a lease that nobody takes up ends,
one that is renewed lasts, and that of a decoder that was killed ends by itself.

Leases of a few seconds; a decoder is a process of its own that says on its standard
output that it has begun. What is held is seen by the daemon's
count of pins.
"""

import subprocess
import sys

import pytest
import torch

import kvclient.hf
from kvclient.hf.handoff import lease
from tests.hf.zoo import build, prompt
from tests.hosts.hosts import Hosts

BLOCK, LEASE_S, WAIT_S = 16, 6.0, 60.0
DECODER = """
import runpy, sys, kvclient
Lease = runpy.run_path(sys.argv[4])["Lease"]  # without transformers, which takes seconds
with kvclient.connect(sys.argv[1]) as client, Lease(client, bytes.fromhex(sys.argv[2]), float(sys.argv[3])):
    print("begun", flush=True)
    sys.stdin.read()
"""


class Decoder:
    """A process that says that it decodes, until it is killed or its standard input is closed."""

    def __init__(self, host, handoff):
        words = [str(host.dir), handoff.mark.hex(), str(handoff.lease_s), lease.__file__]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DECODER, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "begun\n"

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        self.process.communicate(timeout=WAIT_S)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def prefilled(daemon, tmp_path, wait_until, model):
    """(hosts, attachment of the first, its handoff, which has been computed)."""
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    with hosts[0].connect() as client:
        kv = kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)
        handoff = kv.handoff(input_ids=prompt(100), lease_s=LEASE_S)
        assert handoff.wait(WAIT_S)
        yield hosts, kv, handoff
        handoff.release()
        kv.detach()


def pins(hosts):
    with hosts[0].connect() as client:
        return client.stats()["pins"]


def beats(hosts, host):
    with hosts[host].connect() as client:
        return client.stats()["creates"]


def test_a_lease_that_nobody_takes_up_ends(prefilled, wait_until):
    hosts, _, handoff = prefilled
    wait_until(lambda: not handoff.held)
    assert pins(hosts) == 0


def test_who_hands_off_may_let_go(prefilled):
    hosts, _, handoff = prefilled
    assert handoff.held and pins(hosts) == 7, "six whole blocks and what is left behind them"
    handoff.release()
    assert not handoff.held and pins(hosts) == 0


def test_a_lease_lasts_while_a_decoder_lives_and_a_killed_ones_ends(prefilled, wait_until):
    hosts, kv, handoff = prefilled
    with hosts[1].connect() as far, handoff.lease(far):  # a process takes long to begin
        decoder, other = Decoder(hosts[1], handoff), Decoder(hosts[1], handoff)
    decoder.kill()
    seen = beats(hosts, 1)
    wait_until(lambda: beats(hosts, 1) > seen + 8)  # of six of one lease
    assert handoff.held and kv.client.lookup([lease.word_of(handoff.mark)], peers=True).states[0]
    other.kill()
    wait_until(lambda: not handoff.held)
    assert pins(hosts) == 0


def test_a_second_decoder_on_another_host_and_its_end(prefilled, wait_until):
    hosts, kv, handoff = prefilled
    with hosts[0].connect() as near, hosts[1].connect() as far:
        with handoff.lease(near), handoff.lease(far):
            assert handoff.held
        wait_until(lambda: not kv.client.lookup([lease.word_of(handoff.mark)], peers=True).states[0])
    wait_until(lambda: not handoff.held)


def test_a_prefill_that_fails_holds_nothing_and_says_why(prefilled):
    _, kv, _ = prefilled
    wrong = kv.handoff(input_ids=torch.full((1, 40), 1 << 20))  # beyond the vocabulary
    with pytest.raises(IndexError):
        wrong.wait(WAIT_S)
    assert not wrong.held
