"""Parses a config into nodes with positions, by the rules of hjson 3.1.0 (decoder.py), as DeepSpeed
does.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from typing import Any, NoReturn

from ..errors import UsageError


@dataclasses.dataclass
class Node:
    """A value and its position. *bare*: a string without quotes, which ends with its line."""

    start: int
    end: int
    value: Any
    bare: bool = False
    members: list[Member] = dataclasses.field(default_factory=list)
    inside: tuple[int, int] = (0, 0)  # of an object: between its braces


@dataclasses.dataclass
class Member:
    """A key and its value. *comma*: position of the comma after it, if there is one."""

    key: str
    start: int
    key_end: int
    node: Node
    comma: int | None = None


# hjson's NUMBER_RE; the end of a number, true, false or null; an unquoted key.
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?[\t ]*")
STOP = re.compile(r"[,}\]#\n]|//|/\*|\Z")
_BARE_KEY = re.compile(r"([^ \t\n:{}\[\],]+)([ \t\n]*)(?=:)")
_STRING = re.compile(
    r""" "((?:[^"\\\x00-\x1f]|\\.)*)" | '((?:[^'\\\x00-\x1f]|\\.)*)' """, re.VERBOSE
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_ESCAPED = dict(zip("\"'\\/bfnrt", "\"'\\/\b\f\n\r\t", strict=True))
_WORDS = {"true": True, "false": False, "null": None}


class Reader:
    """The nodes of a config. Positions refer to `text`, which is what DeepSpeed parses: without
    byte order mark, and with every line end a newline.
    """

    def __init__(self, original: str) -> None:
        self.original = original
        self.mark = original.startswith("\ufeff")
        body = original.removeprefix("\ufeff")
        self.text = body.replace("\r\n", "\n").replace("\r", "\n")
        pairs = enumerate(re.finditer("\r\n", body))
        self._shrunk = [match.start() - index for index, match in pairs]
        try:
            self.root = self._read_root()
        except RecursionError:
            raise UsageError(
                "line 1, column 1: brackets are nested too deeply to be read; remove some levels"
            ) from None

    def splice(self, edits: list[tuple[int, int, str]]) -> str:
        """The original with each (start, end, new) of *edits* applied. Edits do not overlap."""
        pieces, done = [], 0
        for start, end, new in sorted(edits, key=lambda edit: edit[0]):
            pieces += [self.original[done : self._place(start)], new]
            done = self._place(end)
        return "".join([*pieces, self.original[done:]])

    def fail(self, at: int, message: str) -> NoReturn:
        """Raise UsageError with the line and column of *at*."""
        raise UsageError(
            f"line {self._line(at)}, column {at - self.text.rfind(chr(10), 0, at)}: {message}"
        )

    def skip(self, at: int) -> int:
        """The first position from *at* on that is neither whitespace nor comment."""
        while True:
            while self.text[at : at + 1] in (" ", "\t", "\n"):
                at += 1
            after = self.after_comment(at)
            if after is None:
                return at
            at = after

    def after_comment(self, at: int) -> int | None:
        """The end of the comment that starts at *at*, without its line end; None when there is
        none.
        """
        if self.text.startswith(("#", "//"), at):
            end = self.text.find("\n", at)
            return len(self.text) if end < 0 else end
        if self.text.startswith("/*", at):
            end = self.text.find("*/", at + 2)
            if end < 0:
                self.fail(at, "this comment is never closed; add the missing '*/'")
            return end + 2
        return None

    def indentation(self, at: int) -> str:
        """The leading whitespace of the line of *at*."""
        line = self.text[self.text.rfind("\n", 0, at) + 1 : at]
        return line[: len(line) - len(line.lstrip(" \t"))]

    def _place(self, at: int) -> int:
        return at + bisect.bisect_left(self._shrunk, at) + self.mark

    def _line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def _read_root(self) -> Node | None:
        start = self.skip(0)
        # hjson reads an empty file as {}, unless it has a byte order mark
        if start == len(self.text) and not self.mark:
            return None
        if self.text.startswith("[", start):
            self.fail(start, "the config is a list; DeepSpeed needs an object, { ... }")
        root = self._read_object(start, braces=self.text.startswith("{", start))
        rest = self.skip(root.end)
        if rest != len(self.text):
            self.fail(
                rest,
                "there is more text after the end of the config; remove it, or the bracket that closes too early",
            )
        return root

    def _read_value(self, at: int) -> Node:
        first = self.text[at : at + 1]
        if first == "":
            self.fail(at, "the file ends where a value should be; complete it")
        if first == "{":
            return self._read_object(at, braces=True)
        if first == "[":
            return self._read_list(at)
        if self.text.startswith("'''", at):
            return self._read_lines(at)
        if first in "\"'":
            value, end = self._read_string(at)
            return Node(at, end, value)
        return self._read_bare(at)

    def _read_object(self, start: int, *, braces: bool) -> Node:
        members: list[Member] = []
        inside = start + braces
        at = self.skip(inside)
        places: dict[str, int] = {}
        while at < len(self.text) or braces or not members:
            if braces and self.text.startswith("}", at):
                break
            if at == len(self.text):
                unclosed = "this '{' is never closed; add the missing '}'"
                self.fail(start, unclosed if braces else "there is no 'key: value' here")
            member = self._read_member(at)
            if member.key in places:
                line = self._line(places[member.key])
                self.fail(
                    at,
                    f"key {json.dumps(member.key)} is at line {line} already; DeepSpeed refuses that: remove one of the two",
                )
            places[member.key] = at
            members.append(member)
            at = self.skip(member.node.end)
            if self.text.startswith(",", at):
                member.comma = at
                at = self.skip(at + 1)
        values = {member.key: member.node.value for member in members}
        return Node(start, at + braces, values, members=members, inside=(inside, at))

    def _read_member(self, start: int) -> Member:
        if self.text[start] in "\"'":
            key, key_end = self._read_string(start)
        else:
            match = _BARE_KEY.match(self.text, start)
            if match is None:
                self.fail(
                    start,
                    "a key and ':' should be here; remove this text, or put the key in quotes",
                )
            key, key_end = match[1].rstrip() if match[2] else match[1], match.end(1)
        colon = self.skip(key_end)
        if not self.text.startswith(":", colon):
            self.fail(colon, f"':' should follow the key {json.dumps(key)}; add it")
        return Member(key, start, key_end, self._read_value(self.skip(colon + 1)))

    def _read_list(self, start: int) -> Node:
        values = []
        at = self.skip(start + 1)
        while not self.text.startswith("]", at):
            if at == len(self.text):
                self.fail(start, "this '[' is never closed; add the missing ']'")
            node = self._read_value(at)
            values.append(node.value)
            at = self.skip(node.end)
            if self.text.startswith(",", at):
                at = self.skip(at + 1)
        return Node(start, at + 1, values)

    def _read_string(self, start: int) -> tuple[str, int]:
        match = _STRING.match(self.text, start)
        if match is None:
            self.fail(
                start,
                "this string is not closed on its line; close it, or write a line break as \\n and a tab as \\t",
            )

        def unescape(escape: re.Match[str]) -> str:
            if escape[1]:
                return chr(int(escape[1], 16))
            if escape[2] not in _ESCAPED:
                self.fail(
                    start,
                    f"this string has the unknown escape {escape[0]}; write \\\\ for a backslash",
                )
            return _ESCAPED[escape[2]]

        value = _ESCAPE.sub(unescape, match[1] if match[2] is None else match[2])
        # A surrogate pair of escapes is one character above U+FFFF; UTF-16 joins it.
        return value.encode("utf-16-le", "surrogatepass").decode(
            "utf-16-le", "surrogatepass"
        ), match.end()

    def _read_lines(self, start: int) -> Node:
        """A ''' string. Each line loses the indentation that precedes the quotes."""
        close = self.text.find("'''", start + 3)
        before = self.text.rfind("\n", 0, start)
        # on the first line, hjson searches for the line start from the end of the text, and fails
        # if there is no newline
        if before < 0:
            before = self.text.rfind("\n") - len(self.text)
        if close < 0 or before < -len(self.text):
            self.fail(
                start,
                "this ''' string is never closed, or stands in a file of one line, which hjson cannot read; close it, or use double quotes",
            )
        value = re.sub(
            rf"\n[ \t]{{0,{start - 1 - before}}}", "\n", self.text[start + 3 : close].lstrip(" \t")
        )
        return Node(start, close + 3, value.removeprefix("\n").removesuffix("\n"))

    def _read_bare(self, start: int) -> Node:
        """A number, true, false or null if a valid end follows; else the rest of the line as an
        unquoted string.
        """
        if self.text[start] in "}],:":
            self.fail(start, f"a value should be here, not {self.text[start]!r}; add one")
        for stop in STOP.finditer(self.text, start):
            token = self.text[start : stop.start()]
            end = start + len(token.rstrip(" \t"))
            if token.rstrip() in _WORDS:
                return Node(start, end, _WORDS[token.rstrip()])
            if number := _NUMBER.fullmatch(token):
                return Node(start, end, self._number(start, *number.groups()))
            if stop[0] in ("", "\n"):
                return Node(start, end, token.strip(), bare=True)
        raise AssertionError("the end of the text is a stop")

    def _number(
        self, at: int, whole: str, fraction: str | None, exponent: str | None
    ) -> int | float:
        try:
            if not (fraction or exponent):
                return int(whole)
            value = float(whole + (fraction or "") + (exponent or ""))
            return int(value) if int(value) == value and abs(value) < 1e10 else value
        except (ValueError, OverflowError):
            self.fail(at, "this number is too large to be read; DeepSpeed cannot read it either")
