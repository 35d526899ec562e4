"""SGLang's storage modules, and backends as SGLang makes them: each is closed behind its test."""

import pytest

from tests.engines.sglang.sglang_package import HostPool, config, load

WIRING = {
    "backend_name": "kvstored",
    "module_path": "kvclient.integrations.sglang",
    "class_name": "KvstoredHiCache",
}


@pytest.fixture(scope="module")
def sglang():
    return load()


@pytest.fixture
def make(sglang):
    """A backend as SGLang makes it, its pools registered as SGLang registers them."""
    made = []

    def start(daemon, pools=None, extra=None, in_place=True, **change):
        options = {
            **WIRING,
            "interface_v1": int(in_place),
            "dir": str(daemon.dir),
            "model_identity": "m1",
            **(extra or {}),
        }
        pools = pools or {"kv": HostPool()}
        backend = sglang.factory.StorageBackendFactory.create_backend(
            "dynamic", config(sglang, options, **change), pools["kv"]
        )
        made.append(backend)
        backend.register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            backend.register_mem_host_pool_v2(pool, sglang.storage.PoolName(name))
        backend.on_host_pools_registered()
        return backend

    yield start
    for backend in made:
        backend.close()
