"""The pages of the site that lie outside of docs/: README as its front page, CONTRIBUTING, CHANGELOG.

Owns nothing: a hook of mkdocs. Never writes into docs/. Invariant: a link that works in the repository works
on the site.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def relinked(text: str) -> str:
    """Links from the top of the repository to pages of docs/, as they are from beside those pages."""
    beside = re.sub(r"\]\((?:docs/)?([\w.-]+(?:#[\w-]*)?)\)", r"](\1)", text)
    return beside.replace("](README.md)", "](index.md)")


def on_files(files: Files, config: Any) -> Files:
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text)))
    return files
