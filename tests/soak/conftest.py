"""The daemon with a disk tier of the fault tests, here as well."""

from tests.fault.conftest import rig

__all__ = ["rig"]
