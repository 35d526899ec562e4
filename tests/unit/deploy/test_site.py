"""Goal: the documentation site builds without a warning, has every page, and ends at a link to nowhere.

Method: mkdocs itself, strict, into a temporary directory; then the same with a page that links to nowhere.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def build(top: Path, into: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", "deploy/site/mkdocs.yml", "-d", str(into)],
        cwd=top, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_every_page_is_there_and_nothing_is_warned_of(tmp_path):
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} < pages
    front = (tmp_path / "site/index.html").read_text()
    assert 'href="reuse.html"' in front and 'src="picture.svg"' in front


def test_a_link_to_nowhere_ends_the_build(tmp_path):
    top = tmp_path / "copy"
    for name in ("docs", "deploy/site"):
        shutil.copytree(ROOT / name, top / name)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, top / name)
    (top / "docs/limits.md").write_text("# Limits\n\n[nowhere](nowhere.md)\n")
    done = build(top, tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
