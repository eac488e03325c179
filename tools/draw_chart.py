"""Read the front page's measurements from reports/, and draw docs/step-time-and-memory.svg with
them: `python tools/draw_chart.py`.

`tests/unit/test_docs.py` compares the README's table with `measurements`. The SVG draws its own
background and follows the reader's light or dark scheme. It is narrow, so that its text stays
readable on a phone.
"""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
CHART = ROOT / "docs" / "step-time-and-memory.svg"
DAY = 24 * 60 * 60  # seconds


class Measurement(NamedTuple):
    """One training step. Memory and writes are in GB: *gpu* of each GPU, *host* and *written* of
    all ranks together.
    """

    report: str
    seconds: float
    gpu: float
    host: float
    written: float = 0

    @property
    def written_tb_a_day(self) -> float:
        """TB written in a day of steps without pauses."""
        return self.written / self.seconds * DAY / 1000


class Bar(NamedTuple):
    """A bar of the chart: the name of its measurement, and the two labels."""

    name: str
    title: str
    detail: str


# The groups of the chart. Bars of time have a separate scale in each group; all bars of memory have
# one scale.
GROUPS = {
    "Nothing on a drive": [
        Bar("in-memory", "nvme-offload, compact", "states in host memory"),
        Bar("offload", "nvme-offload, compact", "weights in host memory, too"),
        Bar("streamed", "nvme-offload, compact", "under FSDP2 CPUOffloadPolicy"),
        Bar("fsdp2", "FSDP2 CPUOffloadPolicy", "weights and exact states"),
        Bar("megatrain", "MegaTrain", "bfloat16 weights, no fp32 masters"),
    ],
    "On a drive, time at another scale": [
        Bar("drive", "nvme-offload, compact", "states on the drive"),
        Bar("all-on-drive", "nvme-offload, compact", "weights on the drive, too"),
        Bar("deepspeed", "DeepSpeed ZeRO-3", "exact states, two GPUs"),
    ],
}


WIDTH, MARGIN = 400, 16
TITLE = "One training step of Llama 2 7B"
SUBTITLE = (
    "4 x 2048 tokens for each GPU. One H200: nvme-offload, but",
    "states on the drive; others: one H100, DeepSpeed on two.",
    "Virtual drives. Compact: states with 8-bit moments.",
)
ROW_HEIGHT, BAR_HEIGHT = 60, 13
TIME_WIDTH, MEMORY_WIDTH = 290, 250  # of the longest bar
STYLE = """
    .page { fill: #ffffff; stroke: #d0d7de; }
    text { fill: #1f2328; font: 13px system-ui, "DejaVu Sans", sans-serif; }
    .title { font-size: 16px; font-weight: 600; }
    .bold { font-weight: 600; }
    .small { fill: #59636e; font-size: 12px; font-weight: 400; }
    .theirs { fill: #8c959f; }
    .ours { fill: #0969da; }
    .host { fill: #bf8700; }
    .gpu { fill: #1a7f37; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; stroke: #3d444d; }
      text { fill: #f0f6fc; }
      .small { fill: #9198a1; }
      .theirs { fill: #656c76; }
      .ours { fill: #4493f8; }
      .host { fill: #d29922; }
      .gpu { fill: #3fb950; }
    }
  """


@functools.cache
def text_of(report: str) -> str:
    """A report's text."""
    return (ROOT / "reports" / report).read_text(encoding="utf-8")


def tables(report: str) -> list[list[list[str]]]:
    """The cells of every table of *report*."""
    found: list[list[list[str]]] = [[]]
    for line in text_of(report).splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip(" *") for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def rows(report: str, title: str, *columns: str, table: str = "") -> list[list[str]]:
    """The cells below *columns* of all rows called *title*, in the tables that have these columns
    and whose first column is called *table*.
    """
    return [
        [row[head.index(column)] for column in columns]
        for head, *body in tables(report)
        if head[0] == table and {*columns} <= {*head}
        for row in body
        if row[0] == title
    ]


def written(cell: str) -> float:
    """The second number of "read + written"."""
    return float(cell.partition("+")[2] or 0)


def settled(steps: list[str]) -> list[float]:
    """The seconds of the settled steps. Not settled are the first two, which create states and learn
    their order, and steps 4 and 8, in which "compact" checks whether 8 bits are enough.
    """
    return [float(seconds) for step, seconds in enumerate(steps, 1) if step not in (1, 2, 4, 8)]


def of_systems(title: str) -> Measurement:
    """A system that trained Llama 2 7B on one GPU."""
    report = "systems-h100.md"
    columns = ("s a step", "GPU, GB", "host memory, GB", "drive, GB read + written")
    (row,) = rows(report, title, *columns, table="Llama 2 7B, 6.74 billion")
    return Measurement(report, float(row[0]), float(row[1]), float(row[2]), written(row[3]))


def of_deepspeed() -> Measurement:
    """DeepSpeed without this package, states on the drive, on two GPUs."""
    report = "systems-h100.md"
    title = "7B, DeepSpeed ZeRO-3 by itself, states on the drive, exact"
    columns = ("s a step", "GPU, GB of each", "host memory, GB, both", "drive, GB read + written")
    (row,) = rows(report, title, *columns)
    return Measurement(report, float(row[0]), float(row[1]), float(row[2]), written(row[3]))


def of_zero3() -> Measurement:
    """ZeRO-3 with updates on the GPU."""
    report = "zero3-gpu-h100.md"
    columns = ("seconds of the steps, from the first", "GPU, GB", "host memory, GB")
    ((steps, gpu, host),) = rows(report, "updates on the GPU, after backward", *columns)
    return Measurement(
        report, statistics.median(settled(steps.split(", "))), float(gpu), float(host)
    )


def of_host_memory(title: str) -> Measurement:
    """A row of host-memory-h200.md."""
    report = "host-memory-h200.md"
    columns = ("seconds of the steps, from the second", "GPU, GB", "host memory, GB")
    ((steps, gpu, host),) = rows(report, title, *columns)
    seconds = settled(["", *steps.split(", ")])
    return Measurement(report, statistics.median(seconds), float(gpu), float(host))


def of_everything_on_the_drive() -> Measurement:
    """ZeRO-3 with parameters and states on the drive."""
    report = "zero3-drive-h200.md"
    columns = ("a settled step, s", "GPU, each, GB", "host memory, GB", "GB read + written")
    title = "one GPU: ZeRO-3, parameters on the drive too, 16 GB"
    ((*found, moved),) = rows(report, title, *columns)
    return Measurement(report, *map(float, found), written(moved))


def of_8b_exact() -> Measurement:
    """Llama 3.1 8B with exact states, which equals a run in memory."""
    report = "big-models-h200.md"
    ((seconds, gpu, host, moved),) = rows(
        report,
        "Llama 3.1 8B, 8.03 billion",
        "s",
        "GPU, GB",
        "host memory, GB",
        "GB read + written",
        table="model",
    )
    return Measurement(report, float(seconds), float(gpu), float(host), written(moved))


def of_streamed(report: str, column: str) -> Measurement:
    """A model on one GPU, weights and states streamed from host memory, without a drive."""
    titles = ("a settled step, seconds", "GPU memory, GB", "host memory of the machine, GB")
    found = [float(row[0]) for title in titles for row in rows(report, title, column)]
    return Measurement(report, *found)


def of_70b() -> Measurement:
    """Llama 3.1 70B on one GPU, weights and states streamed from host memory and a drive."""
    measured = of_streamed("big-models-70b-h200.md", "measured")
    ((moved,),) = rows(measured.report, "GB from + to the drive in a settled step", "measured")
    return measured._replace(written=written(moved))


def measurements() -> dict[str, Measurement]:
    """The measurements of the front page, by name."""
    return {
        "in-memory": of_host_memory("`NVMeOptimizer`, larger buckets"),
        "streamed": of_host_memory('FSDP2 with CPUOffloadPolicy, "compact", in backward'),
        "offload": of_host_memory(
            '`Offload`, "compact", in backward, 3.4 GB of GPU memory for weights'
        ),
        "zero3": of_zero3(),
        "fsdp2": of_systems("FSDP2 with CPUOffloadPolicy"),
        "megatrain": of_systems("MegaTrain"),
        "flashoptim": of_systems("FlashOptim, in the GPU's memory"),
        "drive": of_systems("`NVMeOptimizer`, compact, in backward"),
        "all-on-drive": of_everything_on_the_drive(),
        "deepspeed": of_deepspeed(),
        "8b-exact": of_8b_exact(),
        "33b": of_streamed("big-models-streamed-h200.md", '33B, "compact24"'),
        "70b": of_70b(),
    }


def rectangle(kind: str, left: float, top: float, width: float, height: int = BAR_HEIGHT) -> str:
    """A bar."""
    return (
        f'<rect class="{kind}" x="{left:g}" y="{top}" width="{max(2, round(width))}"'
        f' height="{height}"/>'
    )


def drawn(bar: Bar, top: int, measured: Measurement, longest: float, largest: float) -> list[str]:
    """The lines of one bar, from *top* on."""
    side = "ours" if bar.title.startswith("nvme-offload") else "theirs"
    seconds = measured.seconds / longest * TIME_WIDTH
    host = measured.host / largest * MEMORY_WIDTH
    gpu = measured.gpu / largest * MEMORY_WIDTH
    second, third = top + 6, top + 6 + BAR_HEIGHT + 3
    return [
        f'<text class="bold" x="{MARGIN}" y="{top}">{escape(bar.title)}'
        f'<tspan class="small" dx="8">{escape(bar.detail)}</tspan></text>',
        rectangle(side, MARGIN, second, seconds),
        f'<text x="{MARGIN + round(seconds) + 8}" y="{second + 11}">{measured.seconds:.1f} s</text>',
        rectangle("host", MARGIN, third, host),
        rectangle("gpu", MARGIN + round(host), third, gpu),
        f'<text class="small" x="{MARGIN + round(host + gpu) + 8}" y="{third + 11}">'
        f"{measured.host:.1f} + {measured.gpu:.1f} GB</text>",
    ]


def description(measured: dict[str, Measurement]) -> str:
    """The chart in words."""
    return "; ".join(
        f"{bar.title}, {bar.detail}: {figures.seconds:.1f} s, {figures.host:.1f} GB of host memory,"
        f" {figures.gpu:.1f} GB of GPU memory"
        for group in GROUPS.values()
        for bar in group
        for figures in [measured[bar.name]]
    )


def svg(measured: dict[str, Measurement]) -> str:
    """The chart."""
    shown = [measured[bar.name] for group in GROUPS.values() for bar in group]
    largest = max(each.host + each.gpu for each in shown)
    lines, top = [], 30
    lines.append(f'<text class="title" x="{MARGIN}" y="{top}">{TITLE}</text>')
    for line in SUBTITLE:
        top += 18
        lines.append(f'<text class="small" x="{MARGIN}" y="{top}">{line}</text>')
    top += 24
    left = MARGIN
    for kind, label, width in (
        ("ours", "time", 56),
        ("host", "peak of host memory", 152),
        ("gpu", "and of each GPU", 0),
    ):
        lines.append(rectangle(kind, left, top - 10, 10, 10))
        lines.append(f'<text class="small" x="{left + 15}" y="{top}">{label}</text>')
        left += width
    for name, group in GROUPS.items():
        top += 30
        longest = max(measured[bar.name].seconds for bar in group)
        lines.append(f'<text class="title" x="{MARGIN}" y="{top}">{name}</text>')
        top += 24
        for bar in group:
            lines += drawn(bar, top, measured[bar.name], longest, largest)
            top += ROW_HEIGHT
        top -= ROW_HEIGHT - 46
    height = top + 2
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" aria-labelledby="title description">',
        f'<title id="title">{TITLE}</title>',
        f'<desc id="description">{escape(description(measured))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


def main() -> None:
    """Write the chart."""
    CHART.write_text(svg(measurements()), encoding="utf-8")


if __name__ == "__main__":
    main()
