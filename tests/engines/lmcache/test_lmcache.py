"""Goal: LMCache's second level on a daemon: LMCache's own check passes, what was locked stays, what differs
misses, no task is ever left without an answer.

Method: the installed LMCache in processes of its own, its factory, its check tool, its memory objects.
"""

import json
import os
import subprocess

import pytest

from tests.engines.conftest import CACHE, ROOT, on_disk, python_of, run_scene
from tests.engines.signatures import differences, printed, recorded
from tests.hosts.hosts import Hosts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
RUN_S = 300.0


def environment():
    home = CACHE / "lmcache"
    if not (home / ".complete").exists():
        pytest.skip(f"lmcache is not in {CACHE}; `make engines` puts it there")
    return {**os.environ, "PYTHONPATH": f"{home}:{ROOT}", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def test_lmcaches_own_check_passes(daemon):
    spec = {
        "type": "plugin",
        "module_path": "kvclient.integrations.lmcache",
        "class_name": "KvstoredL2Adapter",
        "adapter_params": {"dir": str(daemon().dir), "model_identity": "m1"},
    }
    done = subprocess.run(
        [python_of("vllm"), "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter",
         "--l2-adapter", json.dumps(spec), "--num-keys", "64", "--obj-size", "65536"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert done.stdout.count("64/64") == 8, done.stdout + done.stderr[-3000:]
    assert "FAIL" not in done.stdout + done.stderr


REMOTE = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 1
remote_storage_plugins: ["kvstored"]
remote_url: "plugin://kvstored"
remote_serde: "naive"
blocking_timeout_secs: 60
extra_config:
  remote_storage_plugin.kvstored.module_path: "kvclient.integrations.lmcache"
  remote_storage_plugin.kvstored.class_name: "KvstoredRemoteConnector"
  remote_storage_plugin.kvstored.dir: "{directory}"
  remote_storage_plugin.kvstored.model_identity: "m1"
  remote_storage_plugin.kvstored.timeout_s: 30
"""  # waits for a machine that does much else: what comes too late is a miss, which the check does not expect


def test_lmcaches_own_check_of_remote_backends_passes(daemon, tmp_path):
    kvstored, config = daemon(), tmp_path / "lmcache.yaml"
    config.write_text(REMOTE.format(directory=kvstored.dir))
    done = subprocess.run(
        [python_of("vllm"), "-m", "lmcache.v1.basic_check", "--mode", "test_remote", "--num-keys", "20"],
        cwd=ROOT, env={**environment(), "LMCACHE_CONFIG_FILE": str(config)}, capture_output=True, text=True,
        timeout=RUN_S,
    )  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if line.startswith("|") and "100.0%" in line]
    assert len(rows) == 4, done.stdout + done.stderr[-3000:]
    assert all("20/20" in row for row in rows)
    assert kvstored.connect().stats()["blocks"] >= 20  # it was this store


@pytest.mark.parametrize(
    "scene", ["shared", "identity", "locks", "harm", "given_up", "chunks", "start", "behind_others"]
)
def test_scene(daemon, scene):
    kvstored = daemon(memory="64MiB" if scene == "locks" else "256MiB")
    words = ["tests.engines.lmcache.lmcache_scene", scene, str(kvstored.dir)]
    run_scene(kvstored, words, RUN_S, environment())


def test_objects_of_another_hosts_daemon_are_found(daemon, tmp_path, wait_until):
    """By both ways; what came was fetched from there."""
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    words = ["tests.engines.lmcache.lmcache_scene", "elsewhere", str(hosts[1].dir), str(hosts[0].dir)]
    run_scene(hosts[0], words, RUN_S, environment())
    assert hosts.peers(1)["n0"]["fetched"] == 7  # five objects, two chunks


def test_objects_are_found_after_a_restart_and_from_disk(daemon, tmp_path):
    """By both ways."""
    kvstored = daemon(args=on_disk(tmp_path))
    words = ["tests.engines.lmcache.lmcache_scene", "again", str(kvstored.dir)]
    run_scene(kvstored, words, RUN_S, environment())


def test_the_base_classes_are_as_recorded():
    done = subprocess.run(
        [python_of("vllm"), "-m", "tests.engines.record", "lmcache"], cwd=ROOT, env=environment(),
        capture_output=True, text=True, check=True, timeout=RUN_S,
    )  # fmt: skip
    now = printed(done.stdout)
    assert not differences(now, recorded("lmcache")), "\n".join(differences(now, recorded("lmcache")))
