"""nvme_offload/_aio.pyi describes the extension correctly: names, arguments, defaults and kinds of
values.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from nvme_offload import _aio

STUB = Path(_aio.__file__).with_name("_aio.pyi")

# What pybind11 says of an argument, as a stub says it; a std::string is made of either kind of
# string.
SAME = {"SupportsInt": "int", "SupportsFloat": "float", "Sequence": "list", "bytes": "str"}
MADE_ELSEWHERE = ("File", "Request")  # by functions of the module: they have no constructor


def kinds(annotation: ast.expr | None) -> set[str]:
    """The types that *annotation* allows, by their last names, without type arguments."""
    if annotation is None:
        return set()
    if isinstance(annotation, ast.BinOp):
        return kinds(annotation.left) | kinds(annotation.right)
    if isinstance(annotation, ast.Subscript):
        return kinds(annotation.value)
    if isinstance(annotation, ast.Attribute):
        return kinds(ast.Name(annotation.attr))
    name = (
        annotation.id if isinstance(annotation, ast.Name) else str(getattr(annotation, "value", ""))
    )
    return set() if name == "SupportsIndex" else {SAME.get(name, name)}


def signature(
    function: ast.FunctionDef,
) -> tuple[list[tuple[str, frozenset[str], bool]], frozenset[str]]:
    """Arguments, each with its kinds and whether it may be left out, and the kinds of the
    result.
    """
    arguments = [
        argument for argument in function.args.args if argument.arg not in ("self", "arg0")
    ]
    required = len(arguments) - len(function.args.defaults)
    return [
        (argument.arg, frozenset(kinds(argument.annotation)), index >= required)
        for index, argument in enumerate(arguments)
    ], frozenset(kinds(function.returns))


def stated(documented: object) -> ast.FunctionDef:
    """The signature that pybind11 writes into a docstring."""
    line = (documented.__doc__ or "").strip().splitlines()[0]
    return ast.parse(f"def {line if re.match('[a-z_]', line) else f'property{line}'}: ...").body[0]


def described(tree: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """The public names of the stub and their declarations."""
    names: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            names[node.targets[0].id] = node.value
    return {
        name: node for name, node in names.items() if not name.startswith("_") or name == "__init__"
    }


def compare(node: ast.AST, found: object, where: str) -> list[str]:
    """How *found* differs from its declaration *node*."""
    if isinstance(found, property):
        found = found.fget
    said, is_so = signature(node), signature(stated(found))
    # C++ checks the type of an argument that accepts any object.
    for index, (name, allowed, _) in enumerate(is_so[0]):
        if allowed == {"object"} and index < len(said[0]) and said[0][index][0] == name:
            is_so[0][index] = said[0][index]
    return [] if said == is_so else [f"{where}: the stub says {said}, the module {is_so}"]


def test_the_stub_is_the_module():
    stub = described(ast.parse(STUB.read_text(encoding="utf-8")))
    assert set(stub) == {name for name in dir(_aio) if not name.startswith("_")}
    differences: list[str] = []
    for name, node in stub.items():
        found = getattr(_aio, name)
        if isinstance(node, ast.FunctionDef):
            differences += compare(node, found, name)
            continue
        assert isinstance(node, ast.ClassDef)
        members = described(node)
        is_enum = hasattr(found, "__members__")
        real = {
            member for member in vars(found) if not member.startswith("_") or member == "__init__"
        } - ({"name", "value", "__init__"} if is_enum else set())
        real -= {"__init__"} if name in MADE_ELSEWHERE else set()
        if set(members) != real:
            differences.append(f"{name}: {sorted(set(members) ^ real)} are in one of both only")
        for member in set(members) & real:
            if is_enum:
                assert members[member].value == found.__members__[member].value, f"{name}.{member}"
            else:
                differences += compare(members[member], getattr(found, member), f"{name}.{member}")
    assert differences == []


def test_a_stub_that_is_wrong_would_be_noticed():
    wrong = (
        "def submit_at(self, write: bool, address: int, nbytes: str, owner: object, file: File, offset: int, checksum: bool, "
        "after: list[Request]) -> Request: ..."
    )
    assert compare(ast.parse(wrong).body[0], _aio.Engine.submit_at, "Engine.submit_at")
    assert compare(
        ast.parse(wrong.replace("nbytes: str", "size: int")).body[0],
        _aio.Engine.submit_at,
        "Engine.submit_at",
    )
    assert not compare(
        ast.parse(wrong.replace("nbytes: str", "nbytes: int")).body[0],
        _aio.Engine.submit_at,
        "Engine.submit_at",
    )
