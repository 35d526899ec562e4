"""Goal: the connector for TensorRT-LLM does what the recorded interface asks for, and never loads wrong KV.

Method: TensorRT-LLM needs a GPU to be imported. So its base classes are made from their recorded signatures
(tensorrt_llm_signatures.json, read in its sources), its scheduler's calls are made in its order, and the pool
is a tensor on the CPU. This says nothing about the engine itself, which was never run.
"""

import abc
import gc
import importlib
import inspect
import json
import os
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvclient.errors import BlockLost, InvalidArgument, NoSpace, NotPermitted  # noqa: E402
from kvclient.integrations import health  # noqa: E402
from tests.engines.conftest import drain, flush  # noqa: E402
from tests.engines.pool_bytes import flip_in_pool, take_all  # noqa: E402
from tests.engines.signatures import recorded, signatures  # noqa: E402

TOKENS = 8  # of a block
PROMPT = [(7 * i + 3) % 500 for i in range(45)]


def base(name):
    """A class with the recorded methods, abstract where they are."""

    def init(self, llm_args):
        self._llm_args, self._metadata = llm_args, None

    members = {"__init__": init}
    for method, text in recorded("tensorrt_llm")[name].items():
        if method == "__init__":
            continue
        names = text.removeprefix("abstract ").split(", ")
        function = eval(f"lambda {', '.join(names)}: None")
        members[method] = abc.abstractmethod(function) if text.startswith("abstract ") else function
    members["bind_connector_meta"] = lambda self, metadata: setattr(self, "_metadata", metadata)
    members["get_connector_meta"] = lambda self: self._metadata
    return abc.ABCMeta(name, (), members)


@pytest.fixture
def adapter(monkeypatch):
    names = ["tensorrt_llm", "tensorrt_llm._utils", "tensorrt_llm._torch", "tensorrt_llm._torch.pyexecutor",
             "tensorrt_llm._torch.pyexecutor.connectors",
             "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"]  # fmt: skip
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["tensorrt_llm._utils"].mpi_rank = lambda: int(os.environ.get("TEST_RANK", "0"))
    for kind in ("KvCacheConnectorScheduler", "KvCacheConnectorWorker"):
        setattr(sys.modules[names[-1]], kind, base(kind))
    for part in ("", ".identity", ".scheduler", ".worker"):
        monkeypatch.delitem(sys.modules, "kvclient.integrations.tensorrt_llm" + part, raising=False)
    return importlib.import_module("kvclient.integrations.tensorrt_llm")


def arguments(**change):
    values = {
        "model": "nowhere", "dtype": "float32", "quant_config": None, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "context_parallel_size": 1, "enable_attention_dp": False, **change,
    }  # fmt: skip
    cache = types.SimpleNamespace(dtype=values.pop("cache_dtype", "auto"), tokens_per_block=TOKENS)
    return types.SimpleNamespace(kv_cache_config=cache, **values)


class Stream:
    def synchronize(self):
        pass


class Engine:
    """TensorRT-LLM's calls in its order, one request after the other; a block's KV is made of its tokens."""

    def __init__(self, adapter, monkeypatch, directory, ranks=1, weights="w1", **change):
        options = {"dir": str(directory), "weights_digest": weights, "timeout_s": 0.5, "wait_s": 0.5}
        monkeypatch.setenv("KVSTORED_TENSORRT_LLM", json.dumps(options))
        config = arguments(tensor_parallel_size=ranks, **change)
        self.scheduler = adapter.KvstoredScheduler(config)
        self.workers, self.pools = [], []
        for rank in range(ranks):
            monkeypatch.setenv("TEST_RANK", str(rank))
            self.pools.append(torch.zeros((64, 3, 2, 16)))
            self.workers.append(adapter.KvstoredWorker(config))
            self.workers[-1].register_kv_caches(self.pools[-1])
        self.requests, self.next_block = 0, 0

    def truth(self, rank, tokens):
        generator = torch.Generator().manual_seed(hash((rank, tuple(tokens))) % 2**31)
        return torch.randn((3, 2, 16), generator=generator)

    def run(self, tokens, asked_before=(), had=0, **change):
        """How many tokens were loaded; raises if a block's KV is not that of its tokens. `had`: tokens that
        the engine has in its own cache; `asked_before`: what it said of them when there was no room yet."""
        self.requests += 1
        request = types.SimpleNamespace(
            request_id=self.requests, cache_salt=None, get_tokens=lambda beam: tokens, **change
        )
        for earlier in asked_before:
            self.scheduler.get_num_new_matched_tokens(request, earlier)
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, had)
        assert not is_async
        count = -(-len(tokens) // TOKENS)
        blocks = [(self.next_block + i) % 60 for i in range(count)]
        self.next_block += count
        self.scheduler.update_state_after_alloc(request, blocks)
        data = types.SimpleNamespace(
            request_id=request.request_id, new_tokens=tokens, new_block_ids=blocks, computed_position=had,
            num_scheduled_tokens=len(tokens) - matched - had, cache_salt=request.cache_salt,
        )  # fmt: skip
        output = types.SimpleNamespace(new_requests=[data], cached_requests=[])
        step = self.scheduler.build_connector_meta(output)
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_meta(step)
            for i, block in enumerate(blocks[: had // TOKENS]):
                self.pools[rank][block] = self.truth(rank, tokens[: (i + 1) * TOKENS])
            worker.start_load_kv(Stream())
            for layer in range(3):
                worker.wait_for_layer_load(layer, Stream())
                for i, block in enumerate(blocks):
                    whole = tokens[: (i + 1) * TOKENS]
                    if (i + 1) * TOKENS <= had + matched:
                        assert torch.equal(self.pools[rank][block, layer], self.truth(rank, whole)[layer])
                    else:
                        self.pools[rank][block, layer] = self.truth(rank, whole)[layer]
                worker.save_kv_layer(layer, Stream())
            worker.wait_for_save(Stream())
            assert worker.get_finished([], []) == ([], [])
        assert self.scheduler.request_finished(request, blocks) is False
        return matched


def test_the_classes_have_all_that_is_recorded(adapter):
    for ours, kind in ((adapter.KvstoredScheduler, "Scheduler"), (adapter.KvstoredWorker, "Worker")):
        assert not inspect.isabstract(ours)
        now = signatures(ours)
        for method, text in recorded("tensorrt_llm")[f"KvCacheConnector{kind}"].items():
            assert now[method] == text.removeprefix("abstract "), method


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_engine_loads_what_one_computed(daemon, adapter, monkeypatch, ranks):
    kvstored = daemon()
    first, second = (Engine(adapter, monkeypatch, kvstored.dir, ranks) for _ in range(2))
    assert first.run(PROMPT) == 0
    assert second.run(PROMPT) == 40  # the last token is always computed
    assert second.run(PROMPT[:40]) == 32
    assert second.run(PROMPT[:20] + [1] * 25) == 16
    assert first.run([*PROMPT, *range(30)]) == 40
    assert second.run([*PROMPT, *range(30)]) == 72
    assert kvstored.connect().stats()["pins"] == 0


def test_what_differs_misses(daemon, adapter, monkeypatch):
    kvstored = daemon()
    first = Engine(adapter, monkeypatch, kvstored.dir)
    first.run(PROMPT)
    assert first.run(PROMPT, lora_task_id=7) == 0
    assert first.run(PROMPT, lora_task_id=0) == 0, "a number as any other"
    assert first.run(PROMPT, multimodal_hashes=[[1]]) == 0
    salted = types.SimpleNamespace(request_id=99, cache_salt="tenant", get_tokens=lambda beam: PROMPT)
    assert first.scheduler.get_num_new_matched_tokens(salted, 0) == (0, False)
    for change in (
        {"weights": "w2"},
        {"dtype": "bfloat16"},
        {"cache_dtype": "fp8"},
        {"quant_config": "int4"},
        {"attn_backend": "FLASHINFER"},
    ):
        assert Engine(adapter, monkeypatch, kvstored.dir, **change).run(PROMPT) == 0, change
    with monkeypatch.context() as other_version:
        other_version.setattr(sys.modules["tensorrt_llm"], "__version__", "9", raising=False)
        assert Engine(adapter, monkeypatch, kvstored.dir).run(PROMPT) == 0
    assert Engine(adapter, monkeypatch, kvstored.dir, ranks=2).run(PROMPT) == 0
    assert Engine(adapter, monkeypatch, kvstored.dir).run(PROMPT) == 40


def test_a_request_that_is_asked_of_again_holds_only_what_was_promised_last(daemon, adapter, monkeypatch):
    kvstored = daemon()
    first, second = (Engine(adapter, monkeypatch, kvstored.dir) for _ in range(2))
    stats = kvstored.connect().stats
    first.run(PROMPT)
    assert second.run(PROMPT, asked_before=[0, 0, 16]) == 40
    assert stats()["pins"] == 0
    again = types.SimpleNamespace(request_id=99, cache_salt=None, get_tokens=lambda beam: PROMPT)
    for had, pins in ((0, 5), (24, 2), (40, 0), (0, 5)):
        second.scheduler.get_num_new_matched_tokens(again, had)
        assert stats()["pins"] == pins, had
    second.scheduler.request_finished(again, [])
    assert stats()["pins"] == 0


def test_who_is_asked_of_again_gives_back_its_own_pins_alone(daemon, adapter, monkeypatch):
    """Those of before may be gone by then: its new ones of the same blocks stay, and those of others."""
    kvstored = daemon()
    monkeypatch.setattr("kvclient.integrations.tensorrt_llm.scheduler.MAX_HELD", 5)
    first, second = (Engine(adapter, monkeypatch, kvstored.dir) for _ in range(2))
    stats, other = kvstored.connect().stats, PROMPT[::-1]
    first.run(PROMPT)
    first.run(other)
    a, b, c = (
        types.SimpleNamespace(request_id=number, cache_salt=None, get_tokens=lambda beam, said=said: said)
        for number, said in enumerate([PROMPT, other, PROMPT])
    )
    for request in (a, b, a, c):  # of so many blocks at one time: what the one before it held is gone
        assert second.scheduler.get_num_new_matched_tokens(request, 0) == (40, False)
        assert stats()["pins"] == 5
    second.scheduler.request_finished(a, [])
    assert stats()["pins"] == 5
    second.scheduler.request_finished(c, [])
    assert stats()["pins"] == 0


def test_what_was_promised_before_is_not_loaded_nor_counted_as_computed(daemon, adapter, monkeypatch):
    """Else blocks that no step has computed yet would be stored as if they were right."""
    kvstored = daemon()
    first, second = (Engine(adapter, monkeypatch, kvstored.dir) for _ in range(2))
    first.run(PROMPT[:24])
    request = types.SimpleNamespace(request_id=1, cache_salt=None, get_tokens=lambda beam: PROMPT)
    assert second.scheduler.get_num_new_matched_tokens(request, 0) == (24, False)
    assert second.scheduler.get_num_new_matched_tokens(request, 24) == (0, False)  # it has them by now
    data = types.SimpleNamespace(
        request_id=1, new_tokens=PROMPT, new_block_ids=[0, 1, 2, 3, 4, 5], computed_position=24,
        num_scheduled_tokens=8, cache_salt=None,
    )  # fmt: skip
    step = second.scheduler.build_connector_meta(
        types.SimpleNamespace(new_requests=[data], cached_requests=[])
    )
    assert step.loads == []
    assert [save.block_ids for save in step.saves] == [[0, 1, 2, 3]]


def test_a_request_with_an_adapter_is_not_saved(daemon, adapter, monkeypatch):
    kvstored = daemon()
    first = Engine(adapter, monkeypatch, kvstored.dir)
    first.run(PROMPT, lora_task_id=7)
    assert kvstored.connect().stats()["blocks"] == 0


def test_corrupt_and_gone(daemon, adapter, monkeypatch):
    kvstored = daemon()
    first, second = (Engine(adapter, monkeypatch, kvstored.dir) for _ in range(2))
    first.run(PROMPT)
    flip_in_pool(kvstored.dir, first.truth(0, PROMPT[:16]).numpy().tobytes()[:64])
    assert second.run(PROMPT) == 8  # what is before the corrupt block
    first.run(PROMPT)
    request = types.SimpleNamespace(request_id=7, cache_salt=None, get_tokens=lambda beam: PROMPT)
    assert second.scheduler.get_num_new_matched_tokens(request, 0)[0] == 40
    assert kvstored.connect().stats()["pins"] >= 5  # promised: kept until the load
    transfer = sys.modules["kvclient.integrations.tensorrt_llm.scheduler"]
    second.workers[0].bind_connector_meta(transfer.Step(loads=[transfer.Transfer([bytes(32)], [0])]))
    with pytest.raises(BlockLost):
        second.workers[0].start_load_kv(Stream())
    kvstored.kill()
    assert Engine(adapter, monkeypatch, kvstored.dir).run([9] * 20) == 0


def test_a_worker_that_fails_is_in_the_figures(daemon, adapter, monkeypatch):
    said = {}

    def figure(name, *_, **__):
        said[name] = 0
        return types.SimpleNamespace(
            set=lambda value: said.update({name: value}), inc=lambda: said.update({name: said[name] + 1})
        )

    monkeypatch.setitem(sys.modules, "prometheus_client", types.SimpleNamespace(Gauge=figure, Counter=figure))
    monkeypatch.setattr(health, "_figures", {})

    def no_space(*_):
        raise NoSpace("for once")

    engine = Engine(adapter, monkeypatch, daemon().dir)
    monkeypatch.setattr(engine.workers[0]._pages, "_write", no_space)
    engine.run(PROMPT)
    assert said == {"trtllm:kvstored_degraded": 1, "trtllm:kvstored_failures": 1}
    engine.run(PROMPT[: TOKENS - 1])  # nothing to load or to save: a step is enough
    assert said == {"trtllm:kvstored_degraded": 0, "trtllm:kvstored_failures": 1}


def test_a_store_that_takes_nothing_ends_no_start(daemon, adapter, monkeypatch, caplog, wait_until):
    """Nor is it silent; what could not be tried at the start is tried with the first block that is stored."""
    kvstored = daemon()
    client = kvstored.connect()
    for hinder, release, word in (
        (lambda: drain(kvstored.dir, on=True), lambda held: drain(kvstored.dir, on=False), "drains"),
        (lambda: take_all(client), lambda held: [writer.abort() for writer in held], "in use"),
    ):
        caplog.clear()
        held = hinder()
        engine = Engine(adapter, monkeypatch, kvstored.dir)
        (line,) = [record.getMessage() for record in caplog.records]
        assert "took no block at the start" in line and word in line
        assert engine.run(PROMPT) == 0
        release(held)
        assert engine.workers[0]._pages._untried
        assert engine.run(PROMPT[::-1]) == 0
        assert not engine.workers[0]._pages._untried
        assert engine.run(PROMPT[::-1]) == 40
        client.delete(engine.scheduler._keys(PROMPT[::-1], None, 5))
        flush(kvstored.dir)
        del engine  # what it still holds would come free in the middle of the next turn
        gc.collect()
        wait_until(lambda: client.stats()["zombies"] == 0, "its blocks are free")
    drain(kvstored.dir, on=True)
    engine = Engine(adapter, monkeypatch, kvstored.dir)
    drain(kvstored.dir, on=False)
    with monkeypatch.context() as wrong:
        wrong.setattr("kvclient.integrations.tensor_pages.TensorPages._copy_all", lambda *_: [True])
        assert engine.run(PROMPT) == 0
    worker = engine.workers[0]
    assert worker._pages.put([os.urandom(32)], worker._layout_id, [[worker._row(0)]]) == [False]
    assert "did not come back" in caplog.text
    own_name(monkeypatch, "another process")
    other = Engine(adapter, monkeypatch, kvstored.dir)
    assert other.run(PROMPT) == 0 and other.run(PROMPT) == 40
    assert engine.run(PROMPT) == 0, "what others stored is not promised: its load would end the engine"


def own_name(monkeypatch, name):
    identity = sys.modules["kvclient.integrations.tensorrt_llm.identity"]
    monkeypatch.setattr(identity, "_names", dict.fromkeys(identity._names, name))


def test_a_block_that_comes_back_changed_ends_the_start(daemon, adapter, monkeypatch):
    kvstored = daemon()
    monkeypatch.setattr("kvclient.integrations.tensor_pages.TensorPages._copy_all", lambda *_: [True])
    with pytest.raises(InvalidArgument, match="came back changed"):
        Engine(adapter, monkeypatch, kvstored.dir)
    monkeypatch.setattr("kvclient.integrations.tensor_pages.TensorPages._copy_all", lambda *_: [False])
    with pytest.raises(InvalidArgument, match="not found again"):
        Engine(adapter, monkeypatch, kvstored.dir)


def test_what_does_not_pass_by_itself_ends_the_start(daemon, adapter, monkeypatch):
    """A block that the pool can never take, and a user who may not write."""
    worker = Engine(adapter, monkeypatch, daemon(memory="32MiB").dir).workers[0]
    with pytest.raises(InvalidArgument, match="the pool has 33554432"):
        worker.register_kv_caches(torch.zeros((2, 9 << 20)))

    def refuse(*_args, **_options):
        raise NotPermitted("this user may only read")

    monkeypatch.setattr(worker._client, "create", refuse)
    with pytest.raises(NotPermitted, match="only read"):
        worker.register_kv_caches(torch.zeros((2, 9)))


def test_what_cannot_be_told_apart_is_refused(adapter, monkeypatch, tmp_path):
    monkeypatch.setenv("KVSTORED_TENSORRT_LLM", json.dumps({"dir": str(tmp_path)}))
    with pytest.raises(InvalidArgument, match="nowhere"):
        adapter.KvstoredScheduler(arguments())
    monkeypatch.setenv("KVSTORED_TENSORRT_LLM", json.dumps({"dri": "typo"}))
    with pytest.raises(InvalidArgument, match="dri"):
        adapter.KvstoredScheduler(arguments())
    monkeypatch.setenv("KVSTORED_TENSORRT_LLM", json.dumps({"weights_digest": "w"}))
    with pytest.raises(InvalidArgument, match="attention"):
        adapter.KvstoredScheduler(arguments(enable_attention_dp=True))
