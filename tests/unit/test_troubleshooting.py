"""docs/troubleshooting.md has every message of an error and of a warning that the sources can make,
and the findings of sweep and doctor, with their remedies.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = sorted((ROOT / "nvme_offload").rglob("*.py"))

# The roots of the error family, and classes of Python and click that we raise with our messages.
FAMILY = {
    "OffloadError",
    "ClickException",
    "UsageError",
    "BadParameter",
    "ValueError",
    "PermissionError",
    "ChildProcessError",
    "FileNotFoundError",
}
LOGGED = {"warning", "error", "exception", "critical", "warn"}
_EDGES = " ,.;:()'\"…"
# clauses of a message are taken until there are so many: what a reader would search for
TELLING_CHARACTERS = 25


class Message(NamedTuple):
    """What a place in the sources says, in words that do not vary."""

    place: str
    phrase: str


def family(trees: list[ast.Module]) -> set[str]:
    """The names of all classes of errors."""
    bases = {
        node.name: {
            base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            for base in node.bases
        }
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    found = set(FAMILY)
    while more := {name for name, names in bases.items() if names & found} - found:
        found |= more
    return found


def called(node: ast.AST) -> str:
    """The last name of the called function, "" where it has none."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_logged(node: ast.Call) -> bool:
    """Whether the call is one of a logger, or of warnings.warn."""
    owner = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""
    return owner in ("_log", "log", "logger", "warnings", "logging") and called(node) in LOGGED


class Reader:
    """Finds the messages of one module."""

    def __init__(self, tree: ast.Module, kinds: set[str]) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.inside: dict[ast.AST, ast.FunctionDef | None] = {}
        self.assigned: dict[ast.FunctionDef | None, list[ast.Assign]] = {}
        self._note(tree, None)
        self.raisers = set(kinds)
        # A function that passes one of its parameters on as a message says what its callers say.
        while self._learn():
            pass

    def _note(self, node: ast.AST, function: ast.FunctionDef | None) -> None:
        self.inside[node] = function
        if isinstance(node, ast.Assign):
            self.assigned.setdefault(function, []).append(node)
        if isinstance(node, ast.FunctionDef):
            self.functions[node.name] = node
        for child in ast.iter_child_nodes(node):
            self._note(child, node if isinstance(node, ast.FunctionDef) else function)

    def _says(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and (called(node) in self.raisers or is_logged(node))

    def _learn(self) -> bool:
        before = len(self.raisers)
        for node in [node for node in self.inside if self._says(node)]:
            function = self.inside[node]
            if function is None or function.name == "__init__":
                continue
            messages = {argument.arg for argument in function.args.args} & {
                "message",
                "reason",
                "text",
            }
            if messages & {
                name.id
                for argument in node.args
                for name in ast.walk(argument)
                if isinstance(name, ast.Name)
            }:
                self.raisers.add(function.name)
        return len(self.raisers) > before

    def messages(self) -> Iterator[tuple[int, list[str]]]:
        """Line and fixed pieces of every string that a place may say."""
        for node, function in self.inside.items():
            if self._says(node):
                for argument in [
                    *node.args,
                    *(
                        keyword.value
                        for keyword in node.keywords
                        if keyword.arg in ("message", "reason")
                    ),
                ]:
                    for pieces in self.strings(argument, function):
                        yield node.lineno, pieces
            for argument in self._found(node, function):
                for pieces in self.strings(argument, function):
                    yield node.lineno, first_sentence(pieces)

    def _found(self, node: ast.AST, function: ast.FunctionDef | None) -> list[ast.expr]:
        """What the place says of a drive or a machine that could be better: a warning of the
        sweep's, or a `Finding` of the doctor's.
        """
        warns = function is not None and function.name.endswith("warnings")
        if isinstance(node, ast.Yield) and warns:
            return [node.value] if node.value else []
        if isinstance(node, ast.Return) and warns:
            return node.value.elts if isinstance(node.value, ast.List) else []
        if called(node) == "append" and (warns or getattr(node.func.value, "id", "") == "warnings"):
            return node.args
        if called(node) == "Kept":  # what a sweep says of its profile
            return node.args
        if called(node) == "Finding" and {"warning", "problem"} & {
            constant.value
            for constant in ast.walk(node.args[1])
            if isinstance(constant, ast.Constant)
        }:
            return node.args[2:3]
        return []

    def strings(
        self, node: ast.AST, function: ast.FunctionDef | None, depth: int = 0
    ) -> Iterator[list[str]]:
        """The fixed pieces of each string that *node* may be."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield [piece for part in re.split(r"%\w", node.value) for piece in (part, "")][:-1]
        elif isinstance(node, ast.JoinedStr):
            yield [part.value if isinstance(part, ast.Constant) else "" for part in node.values]
            for name in [
                part.value
                for part in node.values
                if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name)
            ]:
                yield from self.strings(name, function, depth)
        elif isinstance(node, ast.BinOp):
            for side in (node.left, node.right):
                yield from self.strings(side, function, depth)
        elif isinstance(node, ast.IfExp):
            for side in (node.body, node.orelse):
                yield from self.strings(side, function, depth)
        elif isinstance(node, ast.Name) and function is not None and depth < 2:
            for other in self.assigned.get(function, ()):
                if any(node.id in names_of(target) for target in other.targets):
                    yield from self.strings(other.value, function, depth + 1)
        elif (
            isinstance(node, ast.Call)
            and called(node) in self.functions
            and called(node) not in self.raisers
            and depth < 2
        ):
            helper = self.functions[called(node)]
            for other in ast.walk(helper):
                if isinstance(other, ast.Return) and other.value is not None:
                    yield from self.strings(other.value, helper, depth + 1)


def names_of(target: ast.AST) -> set[str]:
    """The names that an assignment to *target* gives values."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def first_sentence(pieces: list[str]) -> list[str]:
    """*pieces* up to the end of the first sentence: the finding, without the advice."""
    taken = []
    for piece in pieces:
        before, end, _ = piece.partition(". ")
        taken.append(before)
        if end:
            break
    return taken


def plain(text: str) -> str:
    """*text* without what Markdown needs and with single blanks."""
    return " ".join(
        re.sub(r"\\([|<>_*])", r"\1", text).replace("`", "").replace("<br>", " ").split()
    )


def phrase_of(pieces: list[str]) -> str:
    """What a reader would search for: the first clauses of the longest piece or, where that says
    too little, all pieces; "" where there are no words.

    What varies is "…", also on the page.
    """
    longest = plain(max(pieces, key=len)).strip(_EDGES)
    words = (
        longest
        if len(longest) >= TELLING_CHARACTERS
        else re.sub("…[… ]*…", "…", plain("".join(piece or "…" for piece in pieces)))
    )
    clauses = re.split(r"(?<=[;:]) ", words.strip(_EDGES))
    taken = clauses.pop(0)
    while clauses and len(taken) < TELLING_CHARACTERS:
        taken += " " + clauses.pop(0)
    taken = taken.strip(_EDGES)
    return taken if len(re.findall(r"[A-Za-z]{2,}", taken)) > 1 else ""


def python_messages() -> Iterator[Message]:
    """The messages of the package."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    # a function of the manifest, which other modules call
    kinds = family(list(trees.values())) | {"corrupt"}
    for path, tree in trees.items():
        for line, pieces in Reader(tree, kinds).messages():
            yield Message(f"{path.relative_to(ROOT)}:{line}", phrase_of(pieces))


def core_messages() -> Iterator[Message]:
    """The messages of the C++ core: the strings of each statement that throws."""
    for path in sorted((ROOT / "aio").glob("*.cpp")):
        text = path.read_text(encoding="utf-8")
        for statement in re.finditer(
            r"\b(?:throw (?:Misuse|Unsupported)\b|raise\b|const std::string text =).*?;\n",
            text,
            re.DOTALL,
        ):
            joined = re.sub(r'"\s*\n\s*"', "", statement[0])
            pieces = [
                piece.replace('\\"', '"') for piece in re.findall(r'"((?:[^"\\]|\\.)*)"', joined)
            ]
            for piece in pieces:
                yield Message(
                    f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, statement.start()) + 1}",
                    phrase_of([piece]),
                )


@functools.cache
def messages() -> list[Message]:
    """The messages of the package and of the core that have words."""
    return sorted({message for message in [*python_messages(), *core_messages()] if message.phrase})


def test_the_messages_are_found():
    """What follows would pass where nothing was found: some of each kind, by way of each way there
    is to say them.
    """
    phrases = {message.phrase for message in messages()}
    for known in (
        "the tensor is not contiguous",  # raised
        "the data read differ from the data written",  # a reason held in a variable
        "is not as it was written",  # handed to a function that raises
        "could be locked in memory",  # within another
        "needs all states of a rank in memory",  # logged
        "copies to and from the GPU will be several times slower",  # warned
        "this build has no checksums",  # of the core
        "is a file mounted as a disk",  # yielded by a function of warnings
        "improve its cooling",  # appended in one
        "Transfers went through the page cache",  # appended to warnings
        "GB/s until its cache is full",  # returned by one
        "requests are free",  # a finding of the doctor's
        "Not kept as the profile of this drive",  # a note on a profile
    ):
        assert any(known in phrase for phrase in phrases), known


def test_the_page_has_every_message():
    page = plain(PAGE.read_text(encoding="utf-8"))
    missing = [f"{place}: {phrase}" for place, phrase in messages() if phrase not in page]
    assert not missing, (
        "give each a row in docs/troubleshooting.md, with what to do:\n" + "\n".join(missing)
    )


def rows() -> list[list[str]]:
    """The cells of each row of the page's tables of messages."""
    tables = re.findall(
        r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [
        re.split(r"(?<!\\) \| ", row.removeprefix("| ").removesuffix(" |"))
        for table in tables
        for row in table.splitlines()
    ]


def test_the_page_has_no_message_that_nothing_says():
    """No user finds a row whose message has changed in the sources."""
    said = [line for row in rows() for line in row[0].split("<br>")]
    assert len(said) > len(messages()) / 2
    phrases = {phrase for _, phrase in messages()}
    assert [line for line in said if not any(phrase in plain(line) for phrase in phrases)] == []


def test_every_row_says_what_to_do():
    assert [row for row in rows() if len(row) < 2 or not row[-1].strip()] == []
