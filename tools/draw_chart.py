"""Draw docs/step-time-and-memory.svg, the README's chart, from reports/training-h200.md: `python
tools/draw_chart.py`.

The SVG draws its own background and follows the reader's light or dark scheme, so any page can show
it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "reports" / "training-h200.md"
CHART = ROOT / "docs" / "step-time-and-memory.svg"

# Variants of the report from top to bottom: their names there, and the two labels of the bar.
LABELS = {
    "DeepSpeed, optimizer on NVMe": ("DeepSpeed 0.19.8", "optimizer states on NVMe"),
    "ours, optimizer on NVMe, 7.6 GB": (
        "nvme-offload",
        "optimizer states on NVMe, host_memory 7.6 GB",
    ),
    "ours, both on NVMe, 5.4 GB": ("nvme-offload", "parameters on NVMe too, host_memory 5.4 GB"),
    "ours, optimizer on NVMe, 23.5 GB": ("nvme-offload", "host_memory 23.5 GB: all states fit"),
}
BAR_WIDTH, VALUE_WIDTH = 190, 80
ROW_HEIGHT, TOP, MARGIN = 54, 104, 20
WIDTH = 2 * (MARGIN + BAR_WIDTH + VALUE_WIDTH)
STYLE = """
    .page { fill: #ffffff; stroke: #d0d7de; }
    text { fill: #1f2328; font: 14px system-ui, "DejaVu Sans", sans-serif; }
    .title { font-size: 16px; font-weight: 600; }
    .bold { font-weight: 600; }
    .small { fill: #59636e; font-size: 12px; font-weight: 400; }
    .theirs { fill: #8c959f; }
    .ours { fill: #0969da; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; stroke: #3d444d; }
      text { fill: #f0f6fc; }
      .small { fill: #9198a1; }
      .theirs { fill: #656c76; }
      .ours { fill: #4493f8; }
    }
  """


class Bar(NamedTuple):
    """One variant: seconds of a step, and peak host memory in GB."""

    variant: str
    step_seconds: float
    peak_gb: float


def bars(report: str) -> list[Bar]:
    """One bar for each of LABELS, from the tables of the report in Markdown."""
    return [
        Bar(
            variant,
            float(cell(report, "Seconds a step", variant, "step")),
            float(cell(report, "Host memory", variant, "peak")),
        )
        for variant in LABELS
    ]


def cell(report: str, section: str, row: str, column: str) -> str:
    """The cell of the first table below the heading *section*."""
    lines = report.partition(f"## {section}\n")[2].splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    head = next(cells for cells in table if column in cells)
    return next(cells for cells in table if cells[0] == row)[head.index(column)]


def panel(found: list[Bar], left: int, title: str, values: list[float], unit: str) -> list[str]:
    """The bars of one quantity, from *left* on, scaled to the largest value."""
    lines = [f'<text x="{left}" y="{TOP - 14}">{escape(title)}</text>']
    for row, (bar, value) in enumerate(zip(found, values, strict=True)):
        width = max(2, round(value / max(values) * BAR_WIDTH))
        top = TOP + row * ROW_HEIGHT + 20
        side = "ours" if bar.variant.startswith("ours") else "theirs"
        lines += [
            f'<rect class="{side}" x="{left}" y="{top}" width="{width}" height="20" rx="3"/>',
            f'<text x="{left + width + 8}" y="{top + 15}">{value:.1f} {unit}</text>',
        ]
    return lines


def svg(report: str) -> str:
    """The chart of *report*."""
    found = bars(report)
    read, write = re.search(r": read ([\d.]+) .*? write ([\d.]+) ", report).groups()  # type: ignore[union-attr]
    accelerator = re.search("- accelerator: (.*)", report)[1]  # type: ignore[index]
    title = f"ZeRO-3 training, 1.6 billion parameters, one {accelerator}"
    text = (
        f"Virtual drive: {float(read):.1f} GB/s read, {float(write):.1f} GB/s write. "
        "Every run ends with the same weights."
    )
    description = "; ".join(
        f"{', '.join(LABELS[bar.variant])}: {bar.step_seconds:.1f} s, {bar.peak_gb:.1f} GB"
        for bar in found
    )
    height = TOP + len(found) * ROW_HEIGHT + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" aria-labelledby="title description">',
        f'<title id="title">{title}</title>',
        f'<desc id="description">{escape(description)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="{MARGIN}" y="30">{title}</text>',
        f'<text class="small" x="{MARGIN}" y="52">{escape(text)}</text>',
    ]
    for row, bar in enumerate(found):
        name, detail = LABELS[bar.variant]
        top = TOP + row * ROW_HEIGHT
        lines += [
            f'<text class="bold" x="{MARGIN}" y="{top + 12}">{escape(name)}'
            f'<tspan class="small" dx="8">{escape(detail)}</tspan></text>',
        ]
    left = MARGIN
    lines += panel(found, left, "Time of a step", [bar.step_seconds for bar in found], "s")
    left += BAR_WIDTH + VALUE_WIDTH + MARGIN
    lines += panel(found, left, "Peak host memory", [bar.peak_gb for bar in found], "GB")
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write the chart."""
    CHART.write_text(svg(REPORT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
