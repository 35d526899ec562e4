"""Runs a command under what a systemd unit forbids, without systemd as process 1:
`sandbox.py UNIT WRITABLE -- COMMAND…`.

Applies the unit's system call filter (libseccomp), memory that is never writable and executable, address
families, no new privileges, an empty capability set, a read-only file system but for WRITABLE and /dev, and a
/proc with processes only. Owns nothing: it becomes the command.
"""

import ctypes
import errno
import os
import re
import subprocess
import sys

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
MS_RDONLY, MS_NOSUID, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18
CLONE_NEWNS = 0x20000
ALLOW = 0x7FFF0000
ERRNO = 0x00050000
EQUAL, MASKED = 4, 7  # libseccomp's comparisons
PROT_WRITE, PROT_EXEC = 2, 4
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2}
libc = ctypes.CDLL(None, use_errno=True)


class Compare(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("how", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def setting(unit: str, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)


def members(group: str) -> set[str]:
    """The system calls of a set, with those of the sets in it."""
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", group], check=True, capture_output=True, text=True
    )
    names = [line.strip() for line in listed.stdout.splitlines()[1:] if not line.strip().startswith("#")]
    found = {name for name in names if not name.startswith("@")}
    for inner in names:
        if inner.startswith("@"):
            found |= members(inner)
    return found


def allowed(unit: str) -> set[str]:
    calls = members("@default")
    for line in setting(unit, "SystemCallFilter"):
        named = set()
        for word in line.removeprefix("~").split():
            named |= members(word) if word.startswith("@") else {word}
        calls = calls - named if line.startswith("~") else calls | named
    return calls


def filter_calls(unit: str) -> None:
    seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    seccomp.seccomp_rule_add_array.argtypes = (
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(Compare)
    )  # fmt: skip
    context = ctypes.c_void_p(seccomp.seccomp_init(ERRNO | errno.EPERM))

    def rule(name: str, *compares: Compare) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            done = seccomp.seccomp_rule_add_array(
                context, ALLOW, number, len(compares), (Compare * max(1, len(compares)))(*compares)
            )
            assert done == 0, (name, done)

    families = [FAMILIES[name] for line in setting(unit, "RestrictAddressFamilies") for name in line.split()]
    both = PROT_WRITE | PROT_EXEC
    special = {
        "socket": [Compare(0, EQUAL, family, 0) for family in families],
        "mmap": [Compare(2, MASKED, both, wanted) for wanted in (0, PROT_WRITE, PROT_EXEC)],
        "mprotect": [Compare(2, MASKED, PROT_EXEC, 0)],
        "pkey_mprotect": [Compare(2, MASKED, PROT_EXEC, 0)],
    }
    for name in sorted(allowed(unit)):
        for compare in special.get(name, [None]):
            rule(name, *([compare] if compare else []))
    assert seccomp.seccomp_load(context) == 0, "the kernel refused the filter"


def call(function: str, *args: object) -> None:
    if getattr(libc, function)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{function}{args}: {os.strerror(ctypes.get_errno())}")


def mounts(writable: str) -> None:
    call("unshare", CLONE_NEWNS)
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"proc", b"/proc", b"proc", MS_NOSUID, b"subset=pid,hidepid=invisible")
    call("mount", writable.encode(), writable.encode(), None, MS_BIND, None)
    call("mount", b"/", b"/", None, MS_BIND | MS_REC, None)
    os.chdir("/")  # the directory of before lies in the mount below
    call("mount", None, b"/", None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)


def main() -> None:
    unit_path, writable, _, *command = sys.argv[1:]
    with open(unit_path) as file:
        unit = file.read()
    directory = os.getcwd()
    mounts(writable)
    os.chdir(directory)
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    filter_calls(unit)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
