"""The README's picture: `python docs/picture.py` writes docs/picture.svg.

Owns its boxes and arrows. Never measures anything.
"""

from pathlib import Path

BOXES = [  # x, y, width, title, line
    (20, 20, 150, "script", "transformers"),
    (190, 20, 150, "kvclient-serve", "OpenAI HTTP, page"),
    (360, 20, 150, "vLLM", "connector"),
    (530, 20, 150, "your program", "Python, C"),
    (20, 270, 320, "disk", "what proved useful, checked"),
    (360, 270, 320, "other hosts", "layer by layer, checked"),
]
STYLE = """text { font: 14px system-ui, sans-serif; fill: #444 } .t { font-weight: 600 }
rect { fill: #8883; stroke: #888 } .pool { fill: #2a78d633; stroke: #2a78d6 }
path { stroke: #888; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }"""


def box(x: int, y: int, width: int, title: str, line: str) -> str:
    middle = x + width // 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="56" rx="8"/>'
        f'<text class="t" x="{middle}" y="{y + 24}" text-anchor="middle">{title}</text>'
        f'<text x="{middle}" y="{y + 43}" text-anchor="middle">{line}</text>'
    )


def picture() -> str:
    up = "".join(f'<path d="M{x + width // 2} 76 V120"/>' for x, y, width, *_ in BOXES if y == 20)
    down = "".join(f'<path d="M{x + width // 2} 226 V270"/>' for x, y, width, *_ in BOXES if y == 270)
    lines = [
        ("kvstored: one pool of KV blocks in shared memory", 150),
        ("a hit is a read of memory: no call, no copy", 176),
        ("a block is immutable once sealed, all layers of its tokens", 200),
    ]
    pool = '<rect class="pool" x="20" y="120" width="660" height="106" rx="8"/>' + "".join(
        f'<text x="350" y="{y}" text-anchor="middle">{line}</text>' for line, y in lines
    )
    boxes = "".join(box(*args) for args in BOXES)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 346" role="img" '
        'aria-label="Processes share one pool of KV blocks; under it a disk, beside it other hosts">'
        f"<style>{STYLE}</style>{up}{down}{pool}{boxes}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("picture.svg").write_text(picture())
