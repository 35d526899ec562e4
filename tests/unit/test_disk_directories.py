"""Goal: what the daemon says of its disk directories is what lies in them. Method: files made beside it."""

import asyncio

from kvstored.disk import Directories


def test_what_is_kept_aside_is_counted(tmp_path):
    configured = [str(tmp_path / name) for name in ("one", "two", "three")]
    directories = Directories(configured, "default")
    try:
        assert asyncio.run(directories.aside()) == (0, 0)
        for name, sizes in (("one", (10, 0)), ("two", (7,))):
            aside = tmp_path / name / "default/aside"
            aside.mkdir()
            for i, size_bytes in enumerate(sizes):
                (aside / f"{i}").write_bytes(b"x" * size_bytes)
        (tmp_path / "three/default/aside").write_bytes(b"no directory")
        (tmp_path / "two/default/aside/link").symlink_to("nowhere")
        count, size_bytes = asyncio.run(directories.aside())
        assert (count, size_bytes) == (4, 17 + len("nowhere"))
    finally:
        directories.close()
