"""README, CONTRIBUTING and docs/: their links lead somewhere, their commands have the options that
they are given, their code runs; the reference builds.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from nvme_offload.commands.cli import command as nvme_offload_command
from nvme_offload.sweep import cli as sweep_cli
from nvme_offload.zero3.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LANGUAGES = {"sh", "python", "json", "yaml", "text"}
# Code that needs one of these is compiled, and what it takes from this package is looked up; all
# other is run.
NEEDS_MORE = {
    "deepspeed",
    "lightning",
    "transformers",
    "accelerate",
    "nvme_offload.zero3",
    "engine",
    "trainer",
}


class Block(NamedTuple):
    """A fenced block, or a command within a line."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of *page*."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(page.name, text.count("\n", 0, match.start()) + 1, match[1], match[2])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands_of(page: Path) -> Iterator[Block]:
    """The lines of its shell blocks, and the commands of ours that stand within its lines."""
    for block in blocks_of(page):
        if block.language == "sh":
            for number, line in enumerate(block.text.replace("\\\n", " ").splitlines(), 1):
                yield Block(page.name, block.line + number, "sh", line.partition(" #")[0])
    for number, line in enumerate(
        re.sub(
            r"^```.*?^```$",
            lambda match: "\n" * match[0].count("\n"),
            page.read_text(),
            flags=re.M | re.S,
        ).splitlines(),
        1,
    ):
        for command in re.findall(
            r"`((?:nvme-sweep|nvme-offload|make|python -m sweeps\S*|tools/\S+|sweeps/\S+\.py) [^`…]+)`",
            line,
        ):
            yield Block(page.name, number, "sh", command)


COMMANDS = [command for page in PAGES for command in commands_of(page) if command.text.strip()]


def test_every_block_says_its_language():
    assert {str(block): block.language for block in BLOCKS if block.language not in LANGUAGES} == {}


def options_of(command: click.Command) -> dict[str, click.Parameter]:
    return {name: parameter for parameter in command.params for name in parameter.opts}


def check_click(command: click.Command, arguments: list[str]) -> None:
    """That *command* knows the options in *arguments*, and the values of those that are a
    choice.
    """
    known = options_of(command)
    for index, argument in enumerate(arguments):
        if argument.startswith("-") and argument not in ("--help", "-h", "--version"):
            name, has_value, value = argument.partition("=")
            assert name in known, f"{argument} is no option; known are {', '.join(known)}"
            following = (
                value if has_value else arguments[index + 1] if index + 1 < len(arguments) else ""
            )
            if (
                isinstance(known[name].type, click.Choice | click.IntRange)
                and re.fullmatch(r"[\w.]+", following)
                and following != "N"
            ):
                known[name].type.convert(following, known[name], None)


def help_of(module: str) -> str:
    """What a command of sweeps/ or tests/ says of itself."""
    arguments = ["-m", module] if not module.endswith(".py") else [module]
    return subprocess.run(
        [sys.executable, *arguments, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout


def check_command(text: str) -> None:
    """That the command *text* could be given: ours with its options, any other as far as the shell
    reads it.
    """
    words = shlex.split(text)
    while words and re.fullmatch(r"\w+=\S*", words[0]):  # variables for one command
        words.pop(0)
    match words:
        case ["nvme-sweep", ("show" | "compare" | "check") as name, *rest]:
            check_click(getattr(sweep_cli, name), rest)
        case ["nvme-sweep", *rest]:
            check_click(sweep_cli.command, rest)
        case ["nvme-offload", "run", "--", *rest]:
            check_command(shlex.join(rest))
        case ["nvme-offload", name, *rest]:
            assert name in nvme_offload_command.commands
            check_click(nvme_offload_command.commands[name], rest)
        case ["make", *rest]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            # the last two are tools/setup-env's
            known = {*re.findall(r"^(\w+) \?=", makefile, re.MULTILINE), "PYTHON", "TORCH"}
            for word in rest:
                name, has_value, _ = word.partition("=")
                assert (
                    name in known if has_value else re.search(rf"^{word}:", makefile, re.MULTILINE)
                ), f"make knows no {name}"
        case ["python", "-m", module, *rest] if module.startswith("sweeps"):
            told = help_of(module)
            assert [word for word in rest if word.startswith("--") and word not in told] == []
        case [path, *_] if path.startswith(("tools/", "sweeps/")):
            assert (ROOT / path).is_file()
        case _:
            done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_a_command_can_be_given(block):
    check_command(block.text)


@pytest.mark.parametrize(
    "wrong",
    [
        "nvme-sweep DIR --thorough",
        "nvme-sweep DIR --engine fast",
        "nvme-offload play",
        "make everything",
        "make sweep DRIVE=x",
        "tools/none x",
        "for x in",
    ],
)
def test_a_wrong_command_is_noticed(wrong):
    with pytest.raises((AssertionError, click.BadParameter)):
        check_command(wrong)


def of_ours(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of what the code takes from this package; name "" for a module itself."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "nvme_offload"
        ):
            for alias in node.names:
                yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "nvme_offload":
                    yield alias.name, ""
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("nvme_offload."):
            module, _, name = ast.unparse(node).rpartition(".")
            yield module, name


PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs(block, tmp_path, monkeypatch):
    tree = ast.parse(block.text)
    for module, name in of_ours(tree):
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        module for module, _ in of_ours(tree)
    }
    names |= {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {
        (node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    if not names & NEEDS_MORE:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        code = block.text.replace("/local_nvme", str(tmp_path))
        exec(compile(code, str(block), "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=str)
def test_json_is_what_deepspeed_and_the_package_read(block):
    config = json.loads(block.text if block.text.lstrip().startswith("{") else f"{{{block.text}}}")
    Settings.of(config)
    zero = pytest.importorskip(
        "deepspeed.runtime.zero.config", reason="DeepSpeed is not installed here"
    )
    zero.DeepSpeedZeroConfig(**config.get("zero_optimization", {}))


def anchors_of(page: Path) -> set[str]:
    """What its headings are linked by."""
    headings = re.findall(
        r"^#+ (.*)$",
        re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} leads to {target}"
        assert not anchor or anchor in anchors_of(file), f"{page.name} leads to {target}"


def test_the_architecture_names_every_room_and_no_file_that_is_not_there():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = ROOT / "nvme_offload"
    table = page.partition("| room |")[2].partition("\n\n")[0]
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()} | {
        path.name for path in package.glob("[a-z]*.py")
    }
    assert (
        set(
            re.findall(
                r"`([a-z0-9_]+(?:/|\.py))`",
                "\n".join(line.split("|")[1] for line in table.splitlines()[2:]),
            )
        )
        == rooms
    )
    answers = page.partition("## Ten questions")[2].partition("## Words")[0]
    named = re.findall(r"`([a-z0-9_]+/[a-z0-9_]+\.(?:py|cpp|h))`", answers)
    assert len(named) > 10
    assert [
        name for name in named if not (package / name).exists() and not (ROOT / name).exists()
    ] == []


def test_every_page_is_reached_from_the_readme():
    targets = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - targets == set()


def test_every_public_name_is_documented_and_the_reference_builds(tmp_path):
    pytest.importorskip("pdoc", reason="pdoc is not installed here")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "build_docs.py", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "nvme_offload.html").read_text(encoding="utf-8")
    for name in importlib.import_module("nvme_offload").__all__:
        assert f'id="{name}"' in page
    assert not re.search(r'src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//|@import', page), (
        "the pages fetch nothing"
    )
