"""Charts by matplotlib, as SVG elements of the page.

Colours of the palette become CSS variables, so that a drawing follows the reader's light or dark
theme; text stays text, in the page's font. Sizes are in points, which are the CSS pixels of a chart at
its natural width.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ..palette import STAND_INS, Palette, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 360  # small enough that text stays readable when a telephone scales the chart down
TEXT, SMALL = 11.5, 10.0
DASHED: tuple[int, tuple[float, ...]] = (0, (3, 2))
DOTTED: tuple[int, tuple[float, ...]] = (0, (1, 2))


@dataclasses.dataclass(frozen=True)
class Chart:
    """A drawing with its text, for readers who do not see it.

    name: for ids. finding: the result, in a sentence or two with numbers. reading: how to read it.
    columns, rows: the numbers as a table. draw: makes the figure in the colours of a palette.
    """

    name: str
    title: str
    finding: str
    reading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    draw: Callable[[Palette], Figure]

    @property
    def alt(self) -> str:
        """The text alternative of the drawing."""
        return f"{self.title}. {self.finding}"

    def svg(self) -> str:
        """The drawing as an element of a page."""
        import matplotlib

        text = io.StringIO()
        with matplotlib.rc_context({**_style(STAND_INS), "svg.hashsalt": self.name}):
            self.draw(STAND_INS).savefig(
                text, format="svg", transparent=True, metadata={"Date": None}
            )
        return _inline(text.getvalue(), self.name, self.alt)


def plot(
    height: float, *, left: float = 46, right: float = 14, top: float = 10, bottom: float = 42
) -> tuple[Figure, Axes]:
    """A figure of *height* with one pair of axes; the margins around it hold labels."""
    figure, axes = panels(1, height - top - bottom, left=left, right=right, top=top, bottom=bottom)
    return figure, axes[0]


def panels(
    count: int,
    height: float,
    *,
    gap: float = 0,
    left: float = 46,
    right: float = 14,
    top: float = 10,
    bottom: float = 42,
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with *count* pairs of axes of *height* under each other, on one horizontal axis."""
    from matplotlib.figure import Figure

    total = top + count * height + (count - 1) * gap + bottom
    # Not through pyplot, which keeps figures and picks a window system.
    figure = Figure(figsize=(WIDTH / 72, total / 72))
    figure.subplots_adjust(
        left=left / WIDTH,
        right=1 - right / WIDTH,
        top=1 - top / total,
        bottom=bottom / total,
        hspace=gap / height,
    )
    return figure, list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])


def note(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    offset: tuple[float, float],
    colour: str,
    **looks: Any,
) -> None:
    """A small text *offset* points from *place*, in data coordinates unless `xycoords` is given."""
    looks = {"fontsize": SMALL, "textcoords": "offset points", "color": colour, **looks}
    axes.annotate(text, place, offset, **looks)


def title(axes: Axes, text: str, colour: str) -> None:
    """A small title at the left above the axes."""
    axes.set_title(text, loc="left", fontsize=SMALL, color=colour, pad=3)


def few_ticks(axes: Axes) -> None:
    """Few numbers on the vertical axis: for panels."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _style(palette: Palette) -> dict[Any, Any]:
    return {
        "svg.fonttype": "none",
        "font.size": TEXT,
        "text.parse_math": False,
        "text.color": palette.ink,
        "axes.edgecolor": palette.line,
        "axes.labelcolor": palette.soft,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.labelsize": SMALL,
        "axes.labelpad": 5,
        "grid.color": palette.line,
        "grid.linewidth": 0.8,
        "xtick.color": palette.line,
        "ytick.color": palette.line,
        "xtick.labelcolor": palette.soft,
        "ytick.labelcolor": palette.soft,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "lines.linewidth": 2,
        "lines.markersize": 5,
    }


def _inline(svg: str, name: str, label: str) -> str:
    """matplotlib's SVG document as an element of a page: themed, labelled, with ids that no other
    chart has, and a third of the size.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL).replace(
        "xlink:href", "href"
    )
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    svg = re.sub(
        r' id="([^"]*)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", svg
    )
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"', "", svg)
    # The page has this rule for its charts; in a chart it would apply to the whole page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<path d="[^"]*" style="fill: none"/>', "", svg)
    svg = re.sub(
        r"<[^>]*>",
        lambda tag: re.sub(
            r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), tag[0]
        ),
        svg,
    )
    svg = themed(svg)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    opening = f'<svg {view_box[0] if view_box else ""} role="img" aria-label="{escape(label)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
    svg = re.sub(r"\s+", " ", re.sub(r">\s+<", "><", svg))
    return re.sub(r"<g/>|<g></g>", "", svg).strip()
