"""Goal: with disk_mounted a directory on the root file system is refused before anything is made.

Method: the real directories, one on the root file system and one on the tmpfs of /dev/shm."""

import os
import tempfile
from pathlib import Path

import pytest

from kvstored.errors import StartupError
from kvstored.tiers.disk_directories import Directories


def test_a_directory_on_the_root_file_system_is_refused_and_not_made():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as on_root:
        if os.stat(on_root).st_dev != os.stat("/").st_dev:
            pytest.skip("/var/tmp is not on the root file system here")
        disk = Path(on_root) / "kv"
        with pytest.raises(StartupError, match="on the root file system, and disk_mounted is set"):
            Directories([str(disk)], "default", mounted=True).open(0)
        assert not disk.exists()
        unasked = Directories([str(disk)], "default")
        unasked.open(0)
        unasked.close()
        with pytest.raises(StartupError, match="on the root file system"):  # also where it is there already
            Directories([str(disk)], "default", mounted=True).open(0)


def test_a_mounted_one_is_taken():
    if os.stat("/dev/shm").st_dev == os.stat("/").st_dev:
        pytest.skip("/dev/shm is no mount here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as mounted:
        directories = Directories([mounted + "/kv"], "default", mounted=True)
        directories.open(0)
        directories.close()
