"""How each contender's process is started, and with what: its interpreter, environment and set-up parameters.

Owns the temporary directories of a run. Data sets: `index` (500,000 small blocks) and `bulk` (2 GiB of
large ones). Contenders that take a directory for their memory (ours, LMDB, memcpy) get the same one: a tmpfs
with huge pages, or with `small` pages a directory of /dev/shm.
"""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

from bench.compare.driver import Driver, DriverFailed
from bench.compare.rows import COLUMNS, CYCLE_BYTES, GIB, INDEX_BLOCKS, LIMITS, MIB
from bench.install import ROOT, Installed, progress
from bench.pages import huge_tmpfs

SETUP_TIMEOUT_S = 120.0
SHARED_ROOM_BYTES = 16 * GIB
MODULES = {
    "kvstored": "bench.peers.ours",
    "limit": "bench.limits.memcpy",
    "vineyard": "bench.peers.vineyard_store",
    "redis": "bench.peers.redis_server",
    "lmdb": "bench.peers.lmdb_file",
    "mooncake": "bench.peers.mooncake_store",
}
QUICK_PEER_BLOCKS = {"vineyard_blocks": 5_000, "mooncake_blocks": 20_000}
# From this size on glibc streams past the caches; its default is most of a cache that others use too.
TUNED_MEMCPY = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0xc0000"}


class Contenders:
    """The processes of one session, started once and asked in turn. A context manager that ends them all."""

    def __init__(self, installed: Installed, session: str, columns: list[str], quick: bool, pages: str):
        self.installed, self.session, self.quick, self.pages = installed, session, quick, pages
        self.columns = [column for column in COLUMNS if column in columns and column in MODULES]
        self.drivers: dict[tuple[str, str], Driver] = {}
        self.absent: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self._limits_file: dict[str, str] = {}

    def __enter__(self):
        # Short: the pathname of a Unix socket has at most 107 bytes.
        self.home = Path(tempfile.mkdtemp(prefix="kvbench-"))
        self.shm = Path(tempfile.mkdtemp(prefix="kvbench-", dir="/dev/shm"))
        self.mounted = contextlib.ExitStack()
        if self.pages == "huge":
            self.mounted.enter_context(huge_tmpfs(self.shm, SHARED_ROOM_BYTES))
        for column in self.columns:
            for variant in LIMITS if column == "limit" else [""]:
                if column != "limit" or self.session == "bulk":
                    self._start(column, variant)
        return self

    @contextlib.contextmanager
    def alone(self, column: str, variant: str = ""):
        """Only this contender's processes run meanwhile."""
        others = [driver for key, driver in self.drivers.items() if key != (column, variant)]
        for driver in others:
            driver.pause()
        try:
            yield
        finally:
            for driver in others:
                driver.go_on()

    def __exit__(self, *_):
        for driver in self.drivers.values():
            driver.close()
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.rmtree(self.shm, ignore_errors=True)
        self.mounted.close()
        shutil.rmtree(self.shm, ignore_errors=True)

    def _environment(self, column: str, variant: str) -> dict[str, str]:
        # More threads of NumPy's library would spin for a tenth of a second beside what a new client does.
        env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        if column == "mooncake":
            env.update(
                LD_LIBRARY_PATH=self.installed.library_path,
                MC_TCP_BIND_ADDRESS="127.0.0.1",
                GLOG_minloglevel="2",
            )
        if variant == "memcpy, tuned":
            env.update(TUNED_MEMCPY)
        return env

    def _parameters(self, column: str, variant: str, directory: Path) -> dict:
        index = self.session == "index"
        params = {
            "dir": str(directory),
            "shm_dir": str(self.shm),
            "dataset": self.session,
            "blocks": INDEX_BLOCKS if index else 0,
        }
        if self.quick:
            params.update(QUICK_PEER_BLOCKS)
        params["pool_bytes"] = {
            "kvstored": 2 * GIB if index else 5 * GIB // 2,
            "vineyard": GIB if index else CYCLE_BYTES + 512 * MIB,
            "mooncake": GIB if index else CYCLE_BYTES + 512 * MIB,
        }.get(column, CYCLE_BYTES)
        params["max_blocks"] = INDEX_BLOCKS + 50_000 if index else 10_000
        params["map_bytes"] = GIB if index else 2 * CYCLE_BYTES
        if column == "redis":
            params.update(
                redis_server=self.installed.redis_server, env={"LD_LIBRARY_PATH": self.installed.library_path}
            )
        if column == "limit":
            params.update(self._limits_file)
            if variant == "non-temporal":
                params["library"] = self.installed.copy_library
        return params

    def launch(self, column: str, name: str, params: dict, variant: str = "") -> Driver:
        """A further process of this column, set up; the caller closes it. Raises DriverFailed."""
        python = self.installed.pythons.get(column, sys.executable)
        driver = Driver(
            name,
            [python, "-m", MODULES[column]],
            self.home / f"{name}.err",
            self._environment(column, variant),
        )
        try:
            answer = driver.ask(SETUP_TIMEOUT_S, call="setup", params=params)
        except DriverFailed:
            driver.close()
            raise
        self.versions[column] = answer["version"]
        return driver

    def _start(self, column: str, variant: str) -> None:
        if column in self.installed.absent:
            self.absent[column] = self.installed.absent[column]
            return
        if variant == "non-temporal" and not self.installed.copy_library:
            self.absent[variant] = self.installed.absent["non-temporal copy"]
            return
        name = f"{column}-{variant.replace(', ', '-')}" if variant else column
        directory = self.home / name
        directory.mkdir()
        progress(f"starting {name} ({self.session})")
        try:
            driver = self.launch(column, name, self._parameters(column, variant, directory), variant)
            self.drivers[column, variant] = driver
            if column == "limit":
                self._limits_file = driver.ask(10, call="info")
        except DriverFailed as failure:
            self.absent[variant or column] = f"did not start: {failure}"
            progress(f"{name}: {self.absent[variant or column]}")

    def client_parameters(self, column: str) -> dict:
        """Set-up of one more client of a running contender. Raises DriverFailed."""
        info = self.drivers[column, ""].ask(30, call="info")
        return {**self._parameters(column, "", self.home), **info}
