"""Goal: SGLang's storage contract on a daemon: the same answers and bytes as SGLang's own file backend, what
differs misses, what was said to be there is there, and a store that is away is an empty one.

Method: SGLang's own base class, factory and failure injector; HiCacheFile is the oracle, operation by
operation. The engine itself needs a GPU and does not run here.
"""

import random
import sys
import types

import pytest
import torch

from kvclient.errors import InvalidArgument
from tests.engines.conftest import drain
from tests.engines.pool_bytes import flip_in_pool, take_all
from tests.engines.sglang.sglang_package import HostPool, config, hashes

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("in_place", [True, False])
def test_the_controllers_way_through_it(daemon, make, in_place):
    """Store, ask and load as cache_controller.py does it, from two engines."""
    kvstored = daemon()
    pool, other = HostPool(in_place=in_place), HostPool(in_place=in_place)
    writer, reader = (make(kvstored, {"kv": pages}, in_place=in_place) for pages in (pool, other))
    for page in range(8):
        pool.fill(page, page)
    keys = hashes(0, 10)
    assert writer.batch_exists(keys) == 0
    if in_place:
        assert writer.batch_set_v1(keys[:8], pool.slots(list(range(8)))) == [True] * 8
    else:
        assert writer.batch_set(keys[:8], [pool.get_data_page(p * pool.page_size) for p in range(8)]) is True
    assert reader.batch_exists(keys) == 8
    assert reader.exists(keys[7])
    assert not reader.exists(keys[8])
    if in_place:
        assert reader.batch_get_v1(keys, other.slots(list(range(10)))) == [True] * 8 + [False] * 2
    else:
        targets = [other.get_dummy_flat_data_page() for _ in keys]
        loaded = reader.batch_get(keys, targets)
        assert [page is not None for page in loaded] == [True] * 8 + [False] * 2
        for page, data in enumerate(loaded[:8]):
            other.set_from_flat_data_page(page * other.page_size, data)
    for page in range(8):
        assert torch.equal(other.page(page), pool.page(page))
    assert not other.page(8).any()
    assert writer.batch_set_v1(keys[:2], pool.slots([0, 1])) == [True, True]  # again: it is there


def test_ranks_that_share_pages_try_theirs_side_by_side(daemon, make, monkeypatch):
    """With latent attention all ranks have the same pages, and start at once."""
    kvstored = daemon()
    backend = type(make(kvstored))
    store, others = backend._set, [1]

    def store_and_let_another_start(self, *arguments):
        done = store(self, *arguments)
        for rank in others[:1]:
            others.clear()
            make(kvstored, is_mla_model=True, tp_rank=rank)
        return done

    monkeypatch.setattr(backend, "_set", store_and_let_another_start)
    make(kvstored, is_mla_model=True, tp_rank=0)
    assert not others


def pools():
    # page_size 1 and one layer, as a state has it; the indexer has no pages in one piece
    return {
        "kv": HostPool(),
        "mamba": HostPool(page_size=1, layers=1),
        "indexer": HostPool(heads=1, in_place=False),
    }


def transfer(sglang, name, keys, pages, pool):
    policy = (
        sglang.storage.PoolHitPolicy.TRAILING_PAGES
        if name == "mamba"
        else sglang.storage.PoolHitPolicy.ALL_PAGES
    )
    return sglang.storage.PoolTransfer(
        name=sglang.storage.PoolName(name), host_indices=pool.slots(pages), keys=keys, hit_policy=policy
    )


@pytest.mark.parametrize("seed", range(6))
def test_it_answers_as_the_file_backend_does(daemon, make, sglang, tmp_path, seed):
    """Random stores, questions and loads of three pools."""
    choose = random.Random(seed)
    ours_pools, file_pools = pools(), pools()
    ours = make(daemon(), ours_pools)
    file = sglang.storage.HiCacheFile(config(sglang, None), str(tmp_path / "hicache"))
    for name, pool in file_pools.items():
        file.register_mem_host_pool_v2(pool, sglang.storage.PoolName(name))
    chain = hashes(1000 * seed, 24)
    for step in range(60):
        names = choose.sample(["kv", "mamba", "indexer"], choose.randint(1, 3))
        first = choose.randrange(20)
        keys = chain[first : first + choose.randint(1, 6)]
        pages = choose.sample(range(1, 64), len(keys))  # 0 is left alone, as the self-test's page was
        match choose.choice(["set", "set", "get", "exists"]):
            case "set":
                for name in names:
                    for page, key in zip(pages, keys, strict=True):
                        for group in (ours_pools, file_pools):
                            group[name].fill(page, int(key, 16))
                answers = [
                    backend.batch_set_v2([transfer(sglang, n, keys, pages, group[n]) for n in names])
                    for backend, group in ((ours, ours_pools), (file, file_pools))
                ]
            case "get":
                answers = [
                    backend.batch_get_v2([transfer(sglang, n, keys, pages, group[n]) for n in names])
                    for backend, group in ((ours, ours_pools), (file, file_pools))
                ]
            case _:
                extra = [n for n in names if n != "kv"]
                trailing = chain[: choose.randint(1, 3)]
                answers = [
                    backend.batch_exists_v2(
                        chain,
                        [transfer(sglang, n, trailing, list(range(len(trailing))), group[n]) for n in extra],
                    )
                    for backend, group in ((ours, ours_pools), (file, file_pools))
                ]
        assert answers[0] == answers[1], f"step {step}"
        for name in ours_pools:
            assert torch.equal(ours_pools[name].kv_buffer, file_pools[name].kv_buffer), f"step {step}, {name}"


def test_a_failing_backend_never_gives_wrong_bytes(daemon, make, sglang, monkeypatch):
    """SGLang's own injector around ours: half of the calls fail."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    pool = HostPool()
    backend = make(daemon(), {"kv": pool})
    assert isinstance(backend, sglang.storage.HiCacheStorageFailureInjector)
    keys, hit = hashes(0, 8), 0
    for _ in range(40):
        for page in range(8):
            pool.fill(page + 1, page)
        truth = [pool.page(page + 1) for page in range(8)]
        backend.batch_set_v1(keys, pool.slots(list(range(1, 9))))
        pool.kv_buffer.zero_()
        backend.batch_exists(keys)
        for page, there in enumerate(backend.batch_get_v1(keys, pool.slots(list(range(1, 9))))):
            hit += there
            assert torch.equal(pool.page(page + 1), truth[page] if there else torch.zeros_like(truth[page]))
    assert hit > 0


CHANGES = {
    "weights": {"extra": {"model_identity": "m2"}},
    "model name": {"model_name": "org/other"},
    "rank": {"tp_rank": 1},
    "ranks": {"tp_size": 4},
    "pipeline": {"pp_size": 2},
    "context": {"attn_cp_size": 2},
    "dtype": {"pools": {"kv": HostPool(dtype=torch.float16)}},
    "logical dtype": {"extra": {"kv_dtype": "float8_e4m3fn"}},
    "page": {"pools": {"kv": HostPool(page_size=8, layers=3, head_dim=4)}},
    "heads": {"pools": {"kv": HostPool(heads=4, head_dim=4)}},
    "layers": {"pools": {"kv": HostPool(layers=6, head_dim=4)}},
    "interface": {"in_place": False},
}


def test_what_differs_in_one_thing_misses(daemon, make):
    kvstored, pool, keys = daemon(), HostPool(), hashes(0, 2)
    writer = make(kvstored, {"kv": pool})
    assert writer.batch_set_v1(keys, pool.slots([1, 2])) == [True, True]
    assert make(kvstored).batch_exists(keys) == 2
    for what, change in CHANGES.items():
        assert make(kvstored, **change).batch_exists(keys) == 0, what
    assert make(kvstored, tp_rank=0, is_mla_model=True).batch_exists(keys) == 0
    replicated = make(kvstored, {"kv": pool}, tp_rank=0, is_mla_model=True)
    assert replicated.batch_set_v1(keys, pool.slots([1, 2])) == [True, True]
    # Every rank has the same pages.
    assert make(kvstored, tp_rank=1, is_mla_model=True).batch_exists(keys) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": {"model_identity": ""}}, "model_path"),
        ({"extra": {"modelidentity": "m1"}}, "modelidentity"),
        ({"pools": {"kv": HostPool(dtype=torch.uint8, heads=1)}}, "kv_dtype"),
        ({"should_split_heads": True}, "tp_lcm_size"),
    ],
)
def test_what_cannot_be_kept_apart_is_refused_at_the_start(daemon, make, change, words):
    with pytest.raises(InvalidArgument, match=words):
        make(daemon(), **change)


def test_a_pool_that_does_not_give_back_its_bytes_is_refused(daemon, make):
    class Wrong(HostPool):
        def get_page_buffer_meta(self, indices):
            pointers, sizes = super().get_page_buffer_meta(indices)
            self.calls = getattr(self, "calls", 0) + 1
            return (pointers[::-1] if self.calls == 5 else pointers), sizes  # the load's

    with pytest.raises(InvalidArgument, match="self-test"):
        make(daemon(), {"kv": Wrong()})


def test_a_store_that_takes_nothing_ends_no_start(daemon, make, caplog, monkeypatch):
    """Nor is it silent; what could not be tried at the start is tried with the first page that is stored."""
    kvstored, pool, keys = daemon(memory="32MiB"), HostPool(), hashes(0, 4)
    client = kvstored.connect()
    held = take_all(client)
    full = make(kvstored, {"kv": pool})
    assert full.batch_set_v1(keys, pool.slots([1, 2, 3, 4])) == [False] * 4
    for writer in held:
        writer.abort()
    drain(kvstored.dir, on=True)
    draining, wrong = make(kvstored, {"kv": pool}), make(kvstored, {"kv": pool})
    drain(kvstored.dir, on=False)
    said = [record.message for record in caplog.records if "took no block at the start" in record.message]
    assert ["in use" in line for line in said] == [True, False, False]
    assert ["drains" in line for line in said] == [False, True, True]
    for turn, backend in enumerate((full, draining)):
        assert backend.pages._untried
        assert backend.batch_set_v1(hashes(10 * turn, 2), pool.slots([1, 2])) == [True] * 2
        assert not backend.pages._untried
    with monkeypatch.context() as patched:
        patched.setattr("kvclient.integrations.pages.Pages._copy_out", lambda *_: set())
        wrong.batch_set_v1(keys[2:], pool.slots([3, 4]))
    assert wrong.batch_exists(keys[:2]) == 0
    assert full.batch_exists(keys[:2]) == 2
    assert full.batch_exists(keys[2:]) == 0  # nor does another engine find what may be wrong
    assert wrong.batch_get_v1(keys[:2], pool.slots([1, 2])) == [False, False]
    assert wrong.batch_set_v1(hashes(90, 1), pool.slots([1])) == [False]
    assert "did not come back as it was" in caplog.text


def test_what_was_said_to_be_there_is_there_until_its_lease_ends(daemon, make, wait_until):
    kvstored = daemon(memory="64MiB")
    pool = HostPool(pages=32, page_size=64, layers=4, heads=8, head_dim=128)  # 1 MiB a page
    backend = make(kvstored, {"kv": pool}, {"lease_s": 3600})
    first, client = hashes(0, 8), kvstored.connect()
    for page in range(8):
        pool.fill(page, page)
    truth = [pool.page(page) for page in range(8)]
    assert all(backend.batch_set_v1(first, pool.slots(list(range(8)))))
    assert backend.batch_exists(first) == 8
    for turn in range(1, 12):  # 352 pages into a pool of 64
        backend.batch_set_v1(hashes(1000 * turn, 32), pool.slots(list(range(32))))
    assert client.stats()["evictions"] > 0
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(first, pool.slots(list(range(8)))) == [True] * 8
    assert all(torch.equal(pool.page(page), truth[page]) for page in range(8))
    wait_until(lambda: client.stats()["pins"] == 0, "the leases end with the load")

    short = make(kvstored, {"kv": pool}, {"lease_s": 0.2})
    assert short.batch_exists(first[:4]) == 4
    wait_until(lambda: client.stats()["pins"] == 0, "the leases end by themselves")


def test_a_corrupt_page_is_a_miss(daemon, make):
    kvstored, pool, keys = daemon(), HostPool(), hashes(0, 3)
    backend = make(kvstored, {"kv": pool})
    for page in range(3):
        pool.fill(page + 1, page)
    truth = [pool.page(page + 1) for page in range(3)]
    assert all(backend.batch_set_v1(keys, pool.slots([1, 2, 3])))
    flip_in_pool(kvstored.dir, truth[1][0].view(torch.uint8).numpy().tobytes())
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(keys, pool.slots([1, 2, 3])) == [True, False, True]
    assert torch.equal(pool.page(1), truth[0])
    assert not pool.page(2).any()
    assert backend.batch_exists(keys) == 1  # the daemon dropped it: nobody will be told that it is there


def test_a_killed_daemon_is_an_empty_store(daemon, make, wait_until, caplog):
    kvstored, pool, keys = daemon(), HostPool(), hashes(0, 4)
    backend = make(kvstored, {"kv": pool}, {"timeout_s": 5.0, "wait_s": 0.2})
    assert all(backend.batch_set_v1(keys, pool.slots([1, 2, 3, 4])))
    kvstored.kill()
    assert backend.batch_set_v1(hashes(50, 4), pool.slots([1, 2, 3, 4])) == [False] * 4
    assert [record.levelname for record in caplog.records if "goes on without" in record.message] == [
        "WARNING"
    ]
    kvstored.start()
    wait_until(lambda: all(backend.batch_set_v1(hashes(50, 4), pool.slots([1, 2, 3, 4]))), "it comes back")
    assert backend.batch_exists(hashes(50, 4)) == 4
    assert any("is back after" in record.message for record in caplog.records)


def test_without_a_daemon_it_starts_and_says_so(sglang, make, tmp_path, caplog):
    class Nowhere:
        dir = tmp_path

    pool = HostPool()
    backend = make(Nowhere, {"kv": pool})
    assert backend.batch_exists(hashes(0, 2)) == 0
    assert backend.batch_set_v1(hashes(0, 2), pool.slots([1, 2])) == [False, False]
    assert any("no daemon at the start" in record.message for record in caplog.records)


def test_weights_that_change_under_it_are_not_shared(daemon, make, monkeypatch):
    """Neither the old KV with who has the new weights, nor the new with who has the old."""
    kvstored, noted = daemon(), []
    context = types.SimpleNamespace(
        server_args=object(), overrides_log=lambda: noted, resolved_server_args_dict=dict
    )
    pool, keys = HostPool(), hashes(0, 3)
    slots = pool.slots([0, 1, 2])
    other = make(kvstored)  # of another process, whose weights stay
    assert other.batch_set_v1(keys[:2], slots[:8]) == [True, True]
    published = types.SimpleNamespace(get_context=lambda: context)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", published)
    first, second = make(kvstored, {"kv": pool}), make(kvstored)
    assert first.batch_set_v1(keys[:2], slots[:8]) == [True, True] and second.batch_exists(keys) == 2
    noted.append(("scheduler.weight_version", {"weight_version": "2"}))
    for backend in (first, second):
        assert backend.batch_exists(keys) == 0
        assert backend.batch_exists_v2(keys).kv_hit_pages == 0
        assert backend.batch_set_v1(keys[2:], slots[8:]) == [False]
        assert backend.batch_get_v1(keys[:2], slots[:8]) == [False, False]
        page = pool.get_dummy_flat_data_page()
        assert backend.batch_set(keys[2:], [page]) is False and backend.batch_get(keys[:1], [page]) == [None]
    first.clear()
    assert first.batch_exists(keys) == 0 and first.batch_set_v1(keys, slots) == [True] * 3
    assert first.batch_exists(keys) == 3 and second.batch_exists(keys) == 0
    second.clear()
    assert second.batch_exists(keys) == 0
    monkeypatch.delitem(sys.modules, "sglang.srt.runtime_context")
    assert make(kvstored).batch_exists(keys) == other.batch_exists(keys) == 2
