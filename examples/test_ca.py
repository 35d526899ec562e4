"""An authority of one's own, and certificates for the daemons of a test: what two hosts need to try TLS.

    python examples/test_ca.py DIR a b c

writes DIR/ca.pem, and for each node DIR/NODE.pem and DIR/NODE.key. Again with another node it adds that one;
with the same node it renews. It needs the `openssl` command. For a test: the authority's key lies beside what
it signs, and nothing is ever revoked. Where hosts are really several, the certificates come from the site's
own authority.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def _openssl(*words: object) -> None:
    ran = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"openssl {words[0]}: {ran.stderr.strip()}")


def authority(directory: Path) -> None:
    """ca.pem and ca.key, if they are not there."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "ca.pem").exists():
        made = ["-keyout", directory / "ca.key", "-out", directory / "ca.pem", "-days", 365]
        _openssl("req", "-x509", *KEY, *made, "-subj", "/CN=a test of kvstored")


def certificate(directory: Path, node: str, days: int = 30, name: str = "") -> tuple[Path, Path]:
    """(certificate, key) at NODE.pem and NODE.key, each replaced as a whole; the DNS name in it is `name`,
    or the node's. Fewer days than none make one that has expired."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        new = Path(scratch)
        subject = ["-subj", f"/CN={name or node}"]
        _openssl("req", "-new", *KEY, "-keyout", new / "key", "-out", new / "csr", *subject)
        (new / "ext").write_text(
            f"subjectAltName=DNS:{name or node}\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        by = ["-CA", directory / "ca.pem", "-CAkey", directory / "ca.key", "-CAcreateserial"]
        said = ["-in", new / "csr", "-days", days, "-extfile", new / "ext", "-out", new / "pem"]
        _openssl("x509", "-req", *by, *said)
        (new / "key").chmod(0o600)
        made = directory / f"{node}.pem", directory / f"{node}.key"
        os.replace(new / "key", made[1])
        os.replace(new / "pem", made[0])
    return made


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    directory = Path(sys.argv[1])
    authority(directory)
    for node in sys.argv[2:]:
        print(*certificate(directory, node))


if __name__ == "__main__":
    main()
