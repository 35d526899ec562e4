"""Goal: what the store's lock guards cannot be touched without it: the check of `make lint` refuses it.

Method: a few lines as Store's friend are compiled by clang with the flags of `.ci/locks`. With the lock they
pass, without it each is refused by name. So neither the annotations nor the flags are lost unnoticed.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FLAGS = re.search(r'flags="(.*)"', (ROOT / ".ci/locks").read_text())[1].split()

pytestmark = pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is missing")

PROBE = """
#include "core/store/store.h"
namespace kv {
class StoreTest {
 public:
  static size_t member(Store& store) {%(lock)s return store.disk_.writes.size(); }
  static void function(Store& store) {%(lock)s store.scan_zombies(); }
  static void slice(Store& store) {%(lock)s store.mutex_.give_way(); }
  static void twice(Store& store) {%(unlocked)s store.remember_unknown({}, true); }
};
}
"""


def compiled(lock: str, unlocked: str) -> subprocess.CompletedProcess:
    source = PROBE % {"lock": lock, "unlocked": unlocked}
    command = ["clang++", *FLAGS, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=source, cwd=ROOT, capture_output=True, text=True)


def test_who_holds_the_lock_touches_what_it_guards():
    passed = compiled(lock="const SlicedLock lock(store.mutex_);", unlocked="")
    assert passed.returncode == 0, passed.stderr


def test_who_does_not_hold_it_is_refused():
    refused = compiled(lock="", unlocked="const SlicedLock lock(store.mutex_);")
    assert refused.returncode != 0
    errors = [line for line in refused.stderr.splitlines() if "error:" in line]
    for said in (
        "reading variable 'disk_' requires holding mutex 'store.mutex_'",
        "calling function 'scan_zombies' requires holding mutex 'store.mutex_'",
        "calling function 'give_way' requires holding mutex 'store.mutex_'",
        "cannot call function 'remember_unknown' while mutex 'store.mutex_' is held",
    ):
        assert any(said in error for error in errors), refused.stderr
    assert len(errors) == 4, refused.stderr
