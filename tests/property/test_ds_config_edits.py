"""Config edits on documents in every style: the values arrive, everything else stays, a second edit
changes nothing, and hjson agrees.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from nvme_offload.ds_config.edit import edit, parse
from nvme_offload.errors import UsageError

KEYS = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
FLAGS = ("single_submit", "overlap_events")
needs_hjson = pytest.mark.skipif(
    importlib.util.find_spec("hjson") is None,
    reason="hjson is not installed; it comes with deepspeed",
)

counts = st.integers(1, 1 << 30)
settings = st.sets(st.sampled_from(KEYS), min_size=1).flatmap(
    lambda keys: st.fixed_dictionaries(
        {key: st.booleans() if key in FLAGS else counts for key in KEYS if key in keys}
    )
)

PLAIN = [
    "1",
    "-0.5",
    "2e8",
    "1048576.0",
    "true",
    "null",
    '"auto"',
    '"\\ud83d\\ude00 \\"}"',
    '"# no remark"',
    "[]",
    '[{"aio": 1}, 2]',
]
OTHERS: dict[str, Any] = {
    "zero_optimization": {"stage": None, "aio": {"block_size": None}},
    "empty": {},
    "fp16": None,
    "notes": None,
    "nested": {"deep": {"deeper": {}}},
}


class Value(NamedTuple):
    """The text of a value, and its key if it is one of `KEYS` in the aio section: what an edit may
    touch.
    """

    text: str
    key: str = ""


Pieces = list[str | Value]


class Writer:
    """Writes objects in a style drawn at random."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.newline = draw(st.sampled_from(["\n", "\r\n"]))
        self.unit = draw(st.sampled_from(["", " ", "  ", "    ", "\t"]))
        self.plain = draw(st.booleans())  # as json.loads takes it
        self.colon = draw(st.sampled_from([":", ": ", " : "]))

    def seldom(self) -> bool:
        return self.draw(st.integers(0, 3)) == 0

    def remark(self, lines: bool) -> str:
        """A comment, or nothing."""
        if self.plain or not self.seldom():
            return ""
        words = self.draw(st.sampled_from(["why", '"aio": {', "}", '"', "a, b: 1"]))
        return self.draw(
            st.sampled_from(
                [f" /* {words} */", f" // {words}{self.newline}", f" # {words}{self.newline}"]
                if lines
                else [f" /* {words} */"]
            )
        )

    def key(self, key: str) -> str:
        quoted = [json.dumps(key), '"' + "".join(f"\\u{ord(letter):04x}" for letter in key) + '"']
        return self.draw(st.sampled_from(quoted))

    def object(self, members: list[tuple[str, Any]], indent: str, lines: bool) -> Pieces:
        """The pieces of an object; a member's content is its pieces, a dict to be written as an
        object, or None for any value.
        """
        inner = indent + self.unit
        between = self.newline + inner if lines else self.draw(st.sampled_from(["", " "]))
        trailing = not self.plain and self.seldom()
        pieces: Pieces = ["{" + self.remark(lines)]
        for index, (key, content) in enumerate(members):
            pieces.append(between + self.key(key) + self.colon)
            if isinstance(content, dict):
                pieces += self.object(list(content.items()), inner, lines and not self.seldom())
            else:
                pieces += content or [Value(self.draw(st.sampled_from(PLAIN)))]
            comma = trailing if index == len(members) - 1 else True
            pieces.append(("," if comma else "") + self.remark(lines))
        blank = self.draw(st.sampled_from(["", " "]))
        pieces.append((self.newline + indent if lines and members else blank) + "}")
        return pieces


@st.composite
def documents(draw: st.DrawFn) -> Pieces:
    """A config with some of `OTHERS`, and perhaps an aio section with some of `KEYS` and others, in
    any order and style.
    """
    writer = Writer(draw)
    lines = draw(st.booleans())
    members: list[tuple[str, Any]] = draw(
        st.lists(
            st.sampled_from(list(OTHERS.items())), unique_by=lambda member: member[0], max_size=4
        )
    )
    kind = draw(st.sampled_from(["none", "null", "section", "section", "section"]))
    if kind == "section":
        section_lines = lines and draw(st.booleans())
        texts = [
            "8",
            "8.0",
            "1e6",
            '"8"',
            '"true"',
            "true",
            "false",
            "null",
            "[8]",
            "{}",
        ]
        keys = draw(st.lists(st.sampled_from([*KEYS, "thread_count", "use_gds"]), unique=True))
        section = [
            (key, [Value(draw(st.sampled_from(texts)), key if key in KEYS else "")]) for key in keys
        ]
        members.insert(
            draw(st.integers(0, len(members))),
            ("aio", writer.object(section, writer.unit if lines else "", section_lines)),
        )
    elif kind == "null":
        members.insert(draw(st.integers(0, len(members))), ("aio", [Value("null", "aio")]))
    return [
        draw(st.sampled_from(["", "\ufeff"])),
        *writer.object(members, "", lines),
        draw(st.sampled_from(["", writer.newline])),
    ]


def text_of(pieces: Pieces, values: Mapping[str, str] = MappingProxyType({})) -> str:
    """The text of *pieces*, with *values* in the aio section."""
    return "".join(
        piece if isinstance(piece, str) else values.get(piece.key, piece.text) for piece in pieces
    )


def only_added(old: str, new: str) -> bool:
    """Whether *new* is *old* with one insertion, or one and a comma."""

    def inserted_once(old: str, new: str) -> bool:
        extra = len(new) - len(old)
        return extra >= 0 and any(
            new[:at] == old[:at] and new[at + extra :] == old[at:] for at in range(len(old) + 1)
        )

    commas = (at for at, letter in enumerate(new) if letter == ",")
    return inserted_once(old, new) or any(
        new[:at] == old[:at] and inserted_once(old[at:], new[at + 1 :]) for at in commas
    )


def without(config: dict[str, Any], keys: tuple[str, ...] = KEYS) -> dict[str, Any]:
    """*config* but for *keys* of its aio section, and for the section if nothing else is in it."""
    rest = {key: value for key, value in (config.get("aio") or {}).items() if key not in keys}
    return {
        **{key: value for key, value in config.items() if key != "aio"},
        **({"aio": rest} if rest else {}),
    }


@given(documents(), settings)
def test_the_values_arrive_and_everything_else_stays(
    pieces: Pieces, aio: dict[str, int | bool]
) -> None:
    text = text_of(pieces)
    edited = edit(text, aio)
    before, after = parse(text), parse(edited)
    assert after["aio"].items() >= aio.items()
    assert all(type(after["aio"][key]) is type(value) for key, value in aio.items())
    assert without(after, tuple(aio)) == without(before, tuple(aio))
    assert list(after)[: len(before)] == list(before)
    assert edit(edited, aio) == edited

    replaced = text_of(pieces, {key: json.dumps(value) for key, value in aio.items()})
    there = before.get("aio") is not None
    missing = [key for key in aio if key not in (before.get("aio") or {})]
    event(
        "nothing missing"
        if there and not missing
        else "keys missing"
        if there
        else "section missing"
    )
    if there and not missing:
        assert edited == replaced
    elif there or "aio" not in before:
        assert only_added(replaced, edited)
    else:
        head, _, tail = text_of(pieces, {"aio": "\0"}).partition("\0")
        assert edited.startswith(head)
        assert edited.endswith(tail)


@given(documents(), settings)
def test_line_ends_stay_of_one_kind(pieces: Pieces, aio: dict[str, int | bool]) -> None:
    text = text_of(pieces)
    kinds = set(re.findall("\r\n|\r|\n", text))
    assert set(re.findall("\r\n|\r|\n", edit(text, aio))) <= (kinds or {"\n"})


@given(documents(), settings)
def test_json_stays_json(pieces: Pieces, aio: dict[str, int | bool]) -> None:
    text = text_of(pieces).removeprefix("\ufeff")
    try:
        before = json.loads(text)
    except ValueError:
        event("hjson")
        return
    event("JSON")
    after = json.loads(edit(text, aio))
    assert after["aio"].items() >= aio.items()
    assert without(after, tuple(aio)) == without(before, tuple(aio))


def read_by_hjson(text: str) -> dict[str, Any] | None:
    """What DeepSpeed makes of *text*: hjson with its hook against duplicates
    (`dict_raise_error_on_duplicate_keys`), None when it refuses.
    """
    import hjson

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError
        return dict(pairs)

    try:
        config = hjson.loads(
            text.replace("\r\n", "\n").replace("\r", "\n"), object_pairs_hook=refuse_duplicates
        )
    except (ValueError, IndexError, OverflowError):
        return None
    return config if isinstance(config, dict) else None


@needs_hjson
@given(documents(), settings)
def test_hjson_reads_an_edited_document_as_it_is_read_here(
    pieces: Pieces, aio: dict[str, int | bool]
) -> None:
    edited = edit(text_of(pieces), aio)
    config = read_by_hjson(edited)
    assert config is not None
    assert config == parse(edited)


TOKENS = [
    *("{", "}", "[", "]", ",", ":", "\n", "\r\n", " ", "\t", "\u00a0", '"', "\\", "\\n"),
    *("/", "//", "/*", "*/", "#", "# x\n", "a", "true", "null", "8", "-", "1.5", "1e3", "007"),
    *('"aio"', '"a": ', "{}", '"x"', "\ufeff", "aio"),
]


@needs_hjson
@given(
    st.lists(st.sampled_from(TOKENS), max_size=24).map("".join) | st.text(max_size=20),
    st.sampled_from(["%s", "{%s}", '{"b": %s}', '{\n  "aio": {%s},\n}', '{"x": 1,\n%s}']),
)
def test_what_is_read_is_read_as_by_hjson(text: str, frame: str) -> None:
    text = frame.replace("%s", text)
    try:
        config = parse(text)
    except UsageError:
        event("refused")
        return
    event("read")
    assert json.dumps(config) == json.dumps(read_by_hjson(text))
    edited = edit(text, {"block_size": 4096, "single_submit": True})
    after = read_by_hjson(edited)
    assert after is not None
    assert after["aio"].items() >= {"block_size": 4096, "single_submit": True}.items()
    assert without(after, ("block_size", "single_submit")) == without(
        config, ("block_size", "single_submit")
    )
    assert edit(edited, {"block_size": 4096, "single_submit": True}) == edited
