"""Goal: an SGLang whose storage base class differs from the one the backend was written for is noticed, by
name.

Method: the signatures of the installed release beside those recorded in sglang_signatures.json.
"""

import pytest

from tests.engines.sglang.sglang_package import load
from tests.engines.signatures import differences, recorded, signatures

pytestmark = pytest.mark.engines
NAMES = ("HiCacheStorage", "HiCacheStorageConfig", "PoolTransfer", "PoolTransferResult")


def test_the_base_classes_are_as_recorded():
    storage = load().storage
    now = {name: signatures(getattr(storage, name)) for name in NAMES}
    assert not differences(now, recorded("sglang")), "\n".join(differences(now, recorded("sglang")))
