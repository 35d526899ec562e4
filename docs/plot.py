"""The README's plot: `python docs/plot.py` draws the table of README.md into docs/plot.svg, one bar a row.

Owns its scale and colours. Never measures anything: the ratios are the table's. Invariant: the plot is of the
table as it stands (tests/unit/house/test_docs.py draws it again and compares).
"""

import math
import re
from html import escape
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
PLOT = TOP / "docs/plot.svg"
ROW_PX, LEFT, RIGHT, WIDE = 34, 330, 60, 720
STYLE = """text { font: 13px system-ui, sans-serif; fill: #444 } .v { font-weight: 600 }
.ahead { fill: #2a78d6 } .behind { fill: #c98a2b } path { stroke: #888; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }"""


def rows(readme: str) -> list[tuple[str, float]]:
    """(operation, ours as against the best peer) of the table whose last column is the ratio."""
    table = re.search(r"^\| operation \|.*\n\|[-|]+\n((?:\|.*\n)+)", readme, re.MULTILINE)
    if not table:
        raise ValueError("README.md has no table of operations")
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines())
    return [(name, float(ratio.split()[0])) for name, *_, ratio in cells]


def plot(bars: list[tuple[str, float]]) -> str:
    """A bar a row, from 1 x (equal) to the right where we are ahead, to the left where not; logarithmic."""
    low, high = (math.log2(f([0.5, *(ratio for _, ratio in bars)])) for f in (min, max))
    scale = (WIDE - LEFT - RIGHT) / (high - low)
    equal = LEFT - low * scale
    parts = []
    for i, (name, ratio) in enumerate(bars):
        y, end = 30 + i * ROW_PX, LEFT + (math.log2(ratio) - low) * scale
        left, width = min(equal, end), max(2.0, abs(end - equal))
        kind = "ahead" if ratio >= 1 else "behind"
        parts.append(
            f'<text x="{LEFT - 12}" y="{y + 16}" text-anchor="end">{escape(name.replace("`", ""))}</text>'
            f'<rect class="{kind}" x="{left:.1f}" y="{y + 3}" width="{width:.1f}" height="18" rx="3"/>'
            f'<text class="v" x="{max(end, equal) + 8:.1f}" y="{y + 17}">{ratio:g} ×</text>'
        )
    height = 40 + len(bars) * ROW_PX
    line = f'<path d="M{equal:.1f} 24 V{height - 8}"/>'
    axis = line + f'<text x="{equal:.1f}" y="16" text-anchor="middle">best peer</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}" role="img" '
        f'aria-label="kvstored beside the best peer, ratio a row">\n<style>{STYLE}</style>\n{axis}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    PLOT.write_text(plot(rows((TOP / "README.md").read_text(encoding="utf-8"))), encoding="utf-8")
