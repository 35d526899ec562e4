"""kvclient.hf over a real daemon that goes away, restarts, evicts or forbids: generate() stays right, and
says so.

Tiny random models; what a model is asked is not the point here.
"""

import os
import pickle
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.connector.save import Publisher
from tests.hf.zoo import build, generate, prompt
from tests.warm_python import run as run_warm

BLOCK = 16
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def model():
    model = build("llama")
    kvclient.hf.self_test(model)
    return model


def test_sealed_blocks_survive_the_daemon_and_are_hit(daemon, model):
    server, ids = daemon(memory="64MiB"), prompt(70)
    plain, *_ = generate(model, ids)
    with server.connect() as client, kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        server.restart(kill=True)
        tokens, *_ = generate(model, ids)
        assert kv.last.reused_tokens == 64
        assert torch.equal(tokens, plain)
        longer = torch.cat([ids, prompt(40, seed=2)], dim=1)
        generate(model, longer)
        generate(model, longer)
        assert kv.last.reused_tokens == 96


def test_the_readmes_program_with_a_model_runs_as_it_stands(daemon, home):
    readme = (ROOT / "README.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (example,) = [code for code in examples if "hf.attach" in code]
    program = f"name, long_prompt = {str(home)!r}, {'The heron stands. ' * 16!r}\n" + example
    env = {**os.environ, "KVSTORED_DIR": str(daemon(memory="64MiB").dir)}
    told = [
        run_warm([sys.executable, "-c", program], cwd=ROOT, env=env, check=True, timeout=300).stdout.split()
        for _ in range(2)
    ]
    assert [reused for reused, _ in told] == ["0", "256"]


def test_a_daemon_that_is_gone_with_on_error_raise(daemon, model):
    server, ids = daemon(memory="64MiB"), prompt(70)
    with (
        server.connect(on_error="raise") as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, on_error="raise") as kv,
    ):
        generate(model, ids)
        server.kill()
        with pytest.raises(kvclient.Unavailable):
            generate(model, prompt(70, seed=2))
        server.start()
        generate(model, ids)
        assert kv.last.reused_tokens == 64


def test_a_daemon_that_is_gone_with_on_error_miss(daemon, model):
    server, ids, new = daemon(memory="64MiB"), prompt(70), prompt(70, seed=2)
    plain, plain_new = generate(model, ids)[0], generate(model, new)[0]
    with (
        server.connect(on_error="miss") as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv,
    ):
        generate(model, ids)
        server.kill()
        assert torch.equal(generate(model, new)[0], plain_new)
        assert (kv.last.reused_tokens, kv.last.published_blocks) == (0, 0)
        assert client.degraded
        assert (kv.last.unavailable, kv.last.no_space) == (4, 0), "absent is not full"
        assert torch.equal(generate(model, ids)[0], plain)
        assert kv.stats["unavailable"] >= 4 and kv.stats["no_space"] == 0


@pytest.mark.parametrize(("on_error", "again"), [("miss", False), ("miss", True), ("raise", True)])
def test_blocks_that_a_dying_daemon_left_unsealed_are_counted(daemon, model, monkeypatch, on_error, again):
    """again: another takes its place before the call ends, which quarantines what was claimed."""
    server, ids = daemon(memory="64MiB"), prompt(70)
    plain, original, killed = generate(model, ids)[0], Publisher.written, []

    def dying(self, layer, *columns):
        original(self, layer, *columns)
        if layer == 1 and not killed:
            killed.append(server.kill())
            if again:
                server.start()
                client.touch([bytes(32)])  # and so attaches anew

    monkeypatch.setattr(Publisher, "written", dying)
    with (
        server.connect(on_error=on_error) as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv,
    ):
        assert torch.equal(generate(model, ids)[0], plain)
        report = kv.last
        assert (report.published_blocks, report.no_space, report.unavailable) == (0, 0, 0)
        assert report.lost_blocks == kv.stats["lost_blocks"] == 4


def test_a_daemon_that_starts_empty_and_numbers_layouts_anew(daemon, model):
    """The ids that this client was told do not hold there: hits must not depend on them."""
    server, ids = daemon(memory="64MiB"), prompt(70)
    plain, *_ = generate(model, ids)
    with server.connect() as client:
        client.register_layout(kvclient.Layout(num_layers=1, num_kv_heads=1, head_dim=8))
        with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
            generate(model, ids)
            server.stop()
            server.args.append("--fresh")
            server.start()
            with server.connect() as other:
                for size in (16, 24, 32):
                    other.register_layout(kvclient.Layout(num_layers=1, num_kv_heads=1, head_dim=size))
            generate(model, ids)
            assert (kv.last.reused_tokens, kv.last.published_blocks) == (0, 4)
            tokens, *_ = generate(model, ids)
            assert kv.last.reused_tokens == 64
            assert torch.equal(tokens, plain)


def fill(client, blocks):
    """Other people's blocks of 64 KiB."""
    layout_id = client.register_layout(
        kvclient.Layout(num_layers=1, num_kv_heads=1, head_dim=128, dtype="uint8")
    )
    chain = kvclient.chain(bytes(32), list(range(128 * blocks)))
    with client.create(chain, layout_id) as writer:
        for index in writer.granted:
            writer[index].layer(0)[...] = 1
            writer[index].mark_layer(0)


def test_a_full_pool_evicts_and_stays_right(daemon, model):
    server = daemon(memory="8MiB")
    prompts = [prompt(300, seed=number) for number in range(4)]
    plain = [generate(model, ids)[0] for ids in prompts]
    with server.connect() as client, kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        fill(client, 400)
        for number in (0, 1, 2, 3, 3, 0):
            assert torch.equal(generate(model, prompts[number])[0], plain[number])
        assert kv.stats["hits"] > 0
        assert kv.stats["no_space"] == 0
        assert client.stats()["evictions"] > 0
        assert client.stats()["pins"] == 0


def test_a_client_that_only_reads_reads(daemon, model):
    server, ids = daemon(memory="64MiB"), prompt(70)
    with server.connect() as client, kvclient.hf.attach(model, client, block_tokens=BLOCK):
        generate(model, ids)
    with (
        server.connect(read_only=True) as reader,
        kvclient.hf.attach(model, reader, block_tokens=BLOCK) as kv,
    ):
        generate(model, ids)
        assert kv.last.reused_tokens == 64
        generate(model, prompt(70, seed=2))
        assert (kv.last.published_blocks, kv.last.write_bypassed) == (0, "not_permitted")


def test_a_forked_child_generates_with_the_store(daemon, model):
    server, ids = daemon(memory="64MiB"), prompt(70)
    plain, *_ = generate(model, ids)
    with server.connect() as client, kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                tokens, *_ = generate(model, ids)
                os.write(writing, pickle.dumps((tokens.tolist(), kv.last.reused_tokens)))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as answers:
            tokens, reused = pickle.loads(answers.read())
        os.waitpid(child, 0)
        assert (tokens, reused) == (plain.tolist(), 64)
        generate(model, ids)
        assert kv.last.reused_tokens == 64


def test_a_process_killed_in_its_prefill_leaves_nothing(daemon, model, wait_until, monkeypatch):
    server, ids = daemon(memory="64MiB"), prompt(70)
    with server.connect() as client:
        child = os.fork()
        if child == 0:
            with server.connect() as second, kvclient.hf.attach(model, second, block_tokens=BLOCK):
                from transformers import DynamicCache

                update = DynamicCache.update

                def stop_at_the_last(self, keys, values, index, *args, **kwargs):
                    if index == 2:
                        signal.pause()
                    return update(self, keys, values, index, *args, **kwargs)

                monkeypatch.setattr(DynamicCache, "update", stop_at_the_last)
                generate(model, ids)
            os._exit(1)
        wait_until(lambda: client.stats()["created"] == 4, "the child's blocks")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wait_until(lambda: client.stats()["used_bytes"] == 0, "the child's memory")
        with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
            generate(model, ids)
            assert (kv.last.reused_tokens, kv.last.published_blocks) == (0, 4)


def test_a_document_one_process_computed_is_used_inside_another_prompt(daemon, model):
    server, document = daemon(memory="64MiB"), prompt(100, seed=5)
    there = """
import sys, torch, kvclient, kvclient.hf
from tests.hf.zoo import build, generate, prompt
with kvclient.connect(dir=sys.argv[1]) as client:
    with kvclient.hf.attach(build("llama"), client, block_tokens=16, repair="auto", self_test=False) as kv:
        generate(kv._model, torch.cat([prompt(21, seed=2), prompt(100, seed=5), prompt(20, seed=3)], dim=1))
"""
    run_warm([sys.executable, "-c", there, str(server.dir)], check=True, cwd=ROOT, timeout=120)
    ids = torch.cat([prompt(38, seed=7), document, prompt(9, seed=4)], dim=1)
    with server.connect() as client:
        for repair, recomputed in (("cacheblend", 5), (kvclient.hf.Repair(max_kl=0.0), 100)):
            with kvclient.hf.attach(model, client, block_tokens=BLOCK, repair=repair, self_test=False) as kv:
                tokens, logits, _ = generate(model, ids)
                assert kv.last.approximate_tokens == 100
                assert recomputed <= kv.last.recomputed_tokens <= recomputed + 20
                with kv.bypass():  # the same attention
                    plain, plain_logits, _ = generate(model, ids)
        assert client.stats()["pins"] == 0
    assert torch.equal(tokens, plain)
    torch.testing.assert_close(logits, plain_logits, rtol=0, atol=1e-4)
