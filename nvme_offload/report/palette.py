"""The colours of a report, light and dark: read is blue, write orange, mixed green, which colour-blind
readers can distinguish.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Palette:
    """Colours by purpose.

    paper, panel, code: grounds. ink, soft: text and quieter text. line: rules and grids. read,
    write, mixed: the phases. slower: worse than the defaults. on_fill, on_half: text on a full and
    on a half-strong fill. good, care: states.
    """

    paper: str
    panel: str
    code: str
    ink: str
    soft: str
    line: str
    read: str
    write: str
    mixed: str
    slower: str
    on_fill: str
    on_half: str
    good: str
    care: str

    def phase(self, name: str) -> str:
        """The colour of the phase *name*."""
        return {"read": self.read, "write": self.write, "mixed": self.mixed}[name]

    def css(self) -> str:
        """The colours as declarations of CSS variables."""
        return " ".join(
            f"{_variable(field.name)}: {getattr(self, field.name)};"
            for field in dataclasses.fields(self)
        )


LIGHT = Palette(
    paper="#f6f5f2",
    panel="#ffffff",
    code="#f2f0eb",
    ink="#1b1f24",
    soft="#5b636c",
    line="#e2dfd8",
    read="#2766bd",
    write="#ad4f0d",
    mixed="#0b7a6f",
    slower="#b4452f",
    on_fill="#ffffff",
    on_half="#1b1f24",
    good="#17704a",
    care="#8f5a00",
)

DARK = Palette(
    paper="#111417",
    panel="#191d21",
    code="#13171a",
    ink="#e9e7e2",
    soft="#a0a8b0",
    line="#2e343a",
    read="#7fb0f5",
    write="#f2a56a",
    mixed="#4fc7b8",
    slower="#ec8e77",
    on_fill="#0d1113",
    on_half="#0d1113",
    good="#63cf98",
    care="#eab960",
)

PRINT = dataclasses.replace(
    LIGHT, paper="#ffffff", code="#f6f6f6", ink="#111111", soft="#4c4c4c", line="#cccccc"
)


def _variable(name: str) -> str:
    return "--" + name.replace("_", "-")


# Charts are drawn with these stand-ins; `themed` replaces them by the CSS variables of the page.
STAND_INS = Palette(
    **{
        field.name: f"#0a0b{index:02x}"
        for index, field in enumerate(dataclasses.fields(Palette), 16)
    }
)


def themed(svg: str) -> str:
    """*svg*, drawn with `STAND_INS`, in the variables that `css` declares."""
    for field in dataclasses.fields(Palette):
        svg = svg.replace(getattr(STAND_INS, field.name), f"var({_variable(field.name)})")
    return svg
