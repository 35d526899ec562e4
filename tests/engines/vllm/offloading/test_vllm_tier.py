"""Goal: the tier beneath vLLM's own host memory gives back the bytes it was given, part of a job where only a
part is there, and an answer to every job whatever becomes of the daemon. The spec's scheduler half finds what
is there, right and of the same identity, and tells what has gone.

Method: vLLM's factory and its types in a process of its own, over plain memory; no engine.
"""

import pytest

from tests.engines.conftest import on_disk, run_scene
from tests.hosts.hosts import Hosts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.mark.parametrize("scene", ["tier", "spec", "marks", "ahead"])
def test_bytes_parts_identity_events_and_harm(daemon, scene):
    kvstored = daemon()
    run_scene(kvstored, [f"tests.engines.vllm.offloading.vllm_{scene}_scene", str(kvstored.dir)], 800.0)


def test_rows_of_another_hosts_daemon_are_found(daemon, tmp_path, wait_until):
    """The tier's: counted where they came from."""
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    words = ["tests.engines.vllm.offloading.vllm_elsewhere_scene", str(hosts[1].dir), str(hosts[0].dir)]
    run_scene(hosts[0], words, 800.0)
    assert hosts.peers(1)["n0"]["fetched"] == 4


def test_rows_are_found_after_a_restart_and_from_disk(daemon, tmp_path):
    """The tier's, by the one that stored them and by another."""
    kvstored = daemon(args=on_disk(tmp_path))
    run_scene(kvstored, ["tests.engines.vllm.offloading.vllm_again_scene", str(kvstored.dir)], 800.0)
