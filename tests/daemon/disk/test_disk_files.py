"""Goal: what a daemon leaves on its disk is what docs/formats.md says, and `kvstored fsck` agrees with it.
Method: a real daemon's files read by the reference reader in plain Python, and checked by the command while
the daemon runs and after it.
"""

from hashlib import sha256

import kvclient
from kvclient.testing.conformance.case import SMALL, check, fill, new_keys, pattern
from kvstored.cli.main import main
from kvstored.errors import Exit
from tests.fault.disks.rig import BLOCK
from tests.golden import reference_block_file as reference


def test_the_reference_reads_what_a_daemon_wrote(rig):
    disk = rig()
    for key in disk.put_on_disk(2):
        fields, layers = reference.read(disk.file_of(key).read_bytes())
        assert fields["key"] == key
        assert fields["layout"] == sha256(BLOCK.to_blob()).digest()
        assert (fields["tokens"], fields["layers"]) == (BLOCK.block_tokens, BLOCK.num_layers)
        for layer, found in enumerate(layers):
            assert found == pattern(key, layer, BLOCK.layer_shape(layer, BLOCK.block_tokens)).tobytes()


def test_a_file_says_whose_block_it_holds(rig, capsys):
    disk = rig()
    identity = bytes(range(32))
    chain = kvclient.chain(identity, range(BLOCK.block_tokens), BLOCK.block_tokens)
    with disk.client.create(chain, disk.layout) as writer:
        writer.seal(zero_rest=True)
    disk.client.touch(chain.keys)
    disk.settled()
    (other,) = disk.put_on_disk(1)
    fields, _ = reference.read(disk.file_of(chain.keys[0]).read_bytes())
    assert (fields["identity"], fields["content_key"]) == (identity, chain.content_keys[0])
    assert reference.read(disk.file_of(other).read_bytes())[0]["identity"] == bytes(32), "not said, not known"
    assert main(["fsck", str(disk.directory)]) == Exit.DONE
    assert f"identities: {identity.hex()[:12]} 1, unknown 1" in capsys.readouterr().out


def test_fsck_agrees(rig, capsys):
    disk = rig()
    keys = disk.put_on_disk(4)
    assert main(["fsck", str(disk.directory)]) == Exit.DONE
    assert "4 blocks" in capsys.readouterr().out
    assert main(["fsck", "--repair", str(disk.directory)]) == Exit.REFUSED
    assert "in use" in capsys.readouterr().err
    disk.daemon.stop()
    path = disk.file_of(keys[0])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert main(["fsck", "--repair", str(disk.directory)]) == Exit.DONE
    disk.restart(memory_too=True)
    disk.settled()
    assert disk.load(keys) == [False, True, True, True]


def test_what_has_no_record_is_found_by_who_waits_for_it(daemon, wait_until, tmp_path):
    """A look-up reads the block table and asks nobody: with all its records in use, what lies on disk only is
    missing there.
    """
    disk = ("--disk", str(tmp_path / "blocks"), "--disk-quota", "64MiB", "--disk-write-priority", "50")
    with daemon(memory="16MiB", args=(*disk, "--max-blocks", "16")).connect() as client:
        keys, layout_id = new_keys(24), client.register_layout(SMALL.to_blob())
        for number, key in enumerate(keys, 1):
            with client.create([key], layout_id, priority=60) as writer:
                fill(writer[0], SMALL.num_layers)
            wait_until(lambda: client.stats()["disk_written"] >= number, "it is written")  # noqa: B023
        unknown = [key for key in keys if client.lookup([key]).states == b"\0"]
        assert len(unknown) >= 8
        with client.get(unknown[:4], wait_s=30) as blocks:
            for block in blocks:
                check(block)
        assert client.prefetch(unknown[4:6]) == 2
