"""Goal: what docs/engines.md tells a user of an engine to copy is what the engine takes.

Method: the page's own commands, with this daemon's directory and this model in them, through vLLM's command
line into engines that hit, through LMCache's command line, and through SGLang's own parser of the backend's
configuration; both end in their own factories.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.engines.conftest import ROOT, python_of, run_scene
from tests.engines.documented import arguments, lines, words_behind
from tests.engines.lmcache.test_lmcache import environment
from tests.engines.sglang.sglang_package import HOME, HostPool, config, hashes, load

CONTEXT, ARGUMENTS = "sglang.srt.runtime_context", "sglang.srt.arg_groups.arg_utils"
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def test_vllm(daemon, tiny_model):
    kvstored = daemon()
    words = ["tests.engines.vllm.vllm_documented_scene", str(kvstored.dir), tiny_model(0)]
    run_scene(kvstored, words, 800.0)


def test_sglang_knows_the_flags():
    """As its sources list them: its command line wants a GPU's packages."""
    load()
    fields = (HOME / "srt/arg_groups/field_order.py").read_text()
    flags = [word for word in words_behind("python -m sglang.launch_server") if word.startswith("--")]
    assert len(flags) > 4
    assert [flag for flag in flags if f'"{flag[2:].replace("-", "_")}"' not in fields] == []


def test_sglang(daemon, tiny_model, monkeypatch):
    sglang, kvstored = load(), daemon()
    context = SimpleNamespace(
        server_args=object(), overrides_log=list,
        resolved_server_args_dict=lambda: {"model_path": tiny_model(0)},
    )  # fmt: skip  # as an engine's process has published them
    parts = {CONTEXT: {"get_context": lambda: context}, ARGUMENTS: {"namespace_of": lambda kind: {}}}
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**part))
    flag = "--hicache-storage-backend-extra-config"
    (extra,) = arguments(flag, **{"/run/kvstored": str(kvstored.dir), "MODEL": tiny_model(0)})
    keys, pages = hashes(0, 2), []
    for _ in range(2):  # two engines
        pool = HostPool()
        backend = sglang.factory.StorageBackendFactory.create_backend("dynamic", config(sglang, extra), pool)
        backend.register_mem_pool_host(pool)
        pages.append((backend, pool))
    (first, filled), (second, other) = pages
    for page in (0, 1):
        filled.fill(page, page)
    assert first.batch_set_v1(keys, filled.slots([0, 1])) == [True, True]
    assert second.batch_exists(keys) == 2
    assert second.batch_get_v1(keys, other.slots([0, 1])) == [True, True]
    assert (other.kv_buffer == filled.kv_buffer).all()
    for backend, _ in pages:
        backend.close()


LMCACHE = """
import argparse, sys
from lmcache.cli.commands.server import ServerCommand
from lmcache.v1.distributed.config import parse_args_to_config
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.multiprocess.config import parse_args_to_http_frontend_config, parse_args_to_mp_server_config
parser = argparse.ArgumentParser()
ServerCommand().add_arguments(parser)
said = parser.parse_args(sys.argv[1:])
parse_args_to_http_frontend_config(said), parse_args_to_mp_server_config(said)
(config,) = parse_args_to_config(said).l2_adapter_config.adapters
adapter = create_l2_adapter(config, l1_memory_desc=L1MemoryDesc(ptr=0, size=0, align_bytes=4))
print(type(adapter).__name__)
adapter.close()
"""


def test_lmcache(daemon, tiny_model, tmp_path):
    kvstored, env = daemon(), environment()
    places = {"/run/kvstored": str(kvstored.dir), "/models/model": tiny_model(0)}
    done = subprocess.run(
        [python_of("vllm"), "-c", LMCACHE, *words_behind("lmcache server", **places)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "KvstoredL2Adapter" in done.stdout, done.stderr[-3000:]
    yaml = lines("yaml").replace("/run/kvstored", str(kvstored.dir)).replace("/models/model", tiny_model(0))
    (tmp_path / "lmcache.yaml").write_text("chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 1\n" + yaml)
    done = subprocess.run(
        [python_of("vllm"), "-m", "lmcache.v1.basic_check", "--mode", "test_remote", "--num-keys", "4"],
        cwd=ROOT, env={**env, "LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml")}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if line.startswith("|") and "100.0%" in line]
    assert len(rows) == 4, done.stdout + done.stderr[-3000:]
    assert kvstored.connect().stats()["blocks"] >= 4
