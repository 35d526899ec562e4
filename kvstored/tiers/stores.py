"""A native store on a pool: its geometry from the configuration, and its making.

Owns nothing. Invariant: a store has exactly the geometry its pool was made for.
"""

from __future__ import annotations

from typing import Any

from kvstored import _core
from kvstored.config.config import Config
from kvstored.tiers.pool_files import SHM_DIR
from kvstored.tiers.pools import Geometry, Pool


def geometry(config: Config, namespace: str) -> Geometry:
    max_blocks = config.blocks_of(namespace)
    return Geometry(
        namespace,
        config.capacity_bytes(namespace),
        max_blocks,
        _core.Store.table_bytes(max_blocks, config.capacity_bytes(namespace)),
        _core.Store.progress_bytes(max_blocks),
    )


def older(geometry: Geometry) -> Geometry:
    """Of a pool that a daemon before 2026-11-25 made, whose table has room for fewer layouts."""
    return geometry.also(
        _core.Store.table_bytes(geometry.max_blocks, geometry.capacity_bytes, _core.FIRST_LAYOUTS)
    )


def new_store(config: Config, pool: Pool) -> Any:
    return _core.Store(
        pool.geometry.namespace,
        pool.table_fd,
        pool.progress_fd,
        pool.pool_fd,
        pool.geometry.capacity_bytes,
        pool.geometry.max_blocks,
        pool.pool_id,
        SHM_DIR,
        pool.prefix,
        pool.adopted,
        bool(config.disks_of(pool.geometry.namespace)),
        config.disk_write_priority,
        config.disk_pending_writes or pool.geometry.max_blocks,
        config.huge_after_s * 1000,
    )


def retire(table_fd: int) -> None:
    """Tells the readers of a pool that is given up to attach anew."""
    _core.Store.retire(table_fd)
