"""README, CONTRIBUTING, docs/ and the index of reports/: their links lead somewhere, their commands
have the options that they are given, their code runs; the pages with the API reference build.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import json
import re
import runpy
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import torch
from click.testing import CliRunner
from processes import finished

from nvme_offload.commands.cli import command as nvme_offload_command
from nvme_offload.tune import cli as sweep_cli
from nvme_offload.zero3.settings import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

ROOT = Path(__file__).parents[2]
URL = "https://github.com/nvme-offload/nvme-offload"
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "index.md"}),  # the site's contents
]
LANGUAGES = {"sh", "python", "json", "yaml", "text", "diff"}
# Code that needs one of these is compiled, and its imports from this package are looked up; all
# other code is run.
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
    return finished([sys.executable, *arguments, "--help"], cwd=ROOT, check=True).stdout


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
            reported = help_of(module)
            assert [word for word in rest if word.startswith("--") and word not in reported] == []
        case [path, *_] if path.startswith(("tools/", "sweeps/")):
            assert (ROOT / path).is_file()
        case _:
            done = finished(["bash", "-n", "-c", text])
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
    """(module, name) of each import from this package in the code; name "" for a module itself."""
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


def links_of(page: Path) -> list[str]:
    """The targets of its links and images, also of those that are defined at the page's end."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.M)


def file_of(page: Path, target: str) -> tuple[Path, str] | None:
    """The file and the anchor that *target* names; None for one outside of the repository."""
    name, _, anchor = target.partition("#")
    if match := re.fullmatch(rf"{URL}/(?:blob|raw|tree)/main/(.*)", name):
        return ROOT / match[1], anchor
    assert not target.startswith((f"{URL}/blob", f"{URL}/raw", f"{URL}/tree")), target
    if target.startswith(("http://", "https://")):
        return None
    return (page.parent / name).resolve() if name else page, anchor


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", ROOT / "reports" / "README.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page):
    for target in links_of(page):
        if found := file_of(page, target):
            file, anchor = found
            assert file.exists(), f"{page.name} leads to {target}"
            assert not anchor or anchor in anchors_of(file), f"{page.name} leads to {target}"


def test_links_of_the_readme_are_absolute_and_defined():
    """A package index shows it, too, and resolves no relative link."""
    targets = links_of(ROOT / "README.md")
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    defined = {name.lower() for name in re.findall(r"^\[([^\]]+)\]: ", text, re.M)}
    used = re.findall(r"\]\[([^\]]+)\]|(?<!\])\[([^\]]+)\](?![\[(:])", text)
    names = {(first or second).lower() for first, second in used}
    assert names == defined


def test_every_address_of_the_project_has_the_one_base():
    """What the pages, the metadata and the forms name is below the URL in pyproject.toml."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert urls["Repository"] == URL
    for name, url in urls.items():
        found = file_of(ROOT / "pyproject.toml", url) if url.startswith(f"{URL}/blob/") else None
        assert url.startswith(URL), name
        assert found is None or found[0].exists(), name
    for path in [ROOT / "CITATION.cff", *(ROOT / ".github").rglob("*.yml")]:
        for url in re.findall(r"https://github\.com/nvme-offload/[^\s\"')]*", path.read_text()):
            assert url == URL or url.startswith(f"{URL}/"), path
            if url.startswith(f"{URL}/blob/"):
                assert file_of(path, url)[0].exists(), f"{path} leads to {url}"


def test_ci_runs_targets_that_the_makefile_has():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    commands = re.findall(r"^ +- run: (make .*)$", workflow, re.MULTILINE)
    assert {"make lint", "make test", "make wheel", "make docs"} <= set(commands)
    for command in commands:
        check_command(command)


REPORTS = ROOT / "reports"


def of_the_repository(directory):
    """The files below *directory*, without the ones that the developer's `make sweep` made."""
    listed = finished(["git", "ls-files", "-z", "."], cwd=directory)
    if listed.returncode:  # no checkout: a source distribution
        return {path for path in directory.rglob("*") if path.is_file()}
    return {directory / name for name in listed.stdout.split("\0") if name}


def test_the_index_of_reports_reaches_every_file():
    reached = {
        file_of(REPORTS / "README.md", target)[0] for target in links_of(REPORTS / "README.md")
    }
    files = of_the_repository(REPORTS)
    # the files of a directory are reached from its report
    folders = {path.parent for path in reached if path.name == "report.md"}
    assert {path for path in files if not folders & {*path.parents}} - reached == {
        REPORTS / "README.md"
    }
    deeper = (path.relative_to(REPORTS).parts for path in files if path.parent != REPORTS)
    assert folders == {REPORTS / parts[0] for parts in deeper}


INDEXED = [
    line.strip("| ").split(" | ")
    for line in (REPORTS / "README.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| [")
]


@pytest.mark.parametrize("row", INDEXED, ids=lambda row: re.match(r"\[(.*?)\]", row[0])[1])
def test_a_row_of_the_index_has_the_date_and_the_command_of_its_report(row):
    link, _machine, date, command, shows = row
    report = (REPORTS / re.search(r"\]\((.*?)\)", link)[1]).read_text(encoding="utf-8")
    assert date in report
    assert command.strip("`") in report
    assert shows


@pytest.mark.parametrize("report", sorted(REPORTS.glob("[a-z]*.md")), ids=lambda path: path.stem)
def test_a_report_says_if_its_benchmark_is_gone(report):
    text = report.read_text(encoding="utf-8")
    named = set(re.findall(r"python3? -m (sweeps(?:\.[a-z_]+)+)", text))
    gone = {name for name in named if not list(ROOT.glob(name.replace(".", "/") + "*"))}
    if gone:
        assert re.search("no longer in the repository|An earlier version", text), gone


FRONT_PAGE = runpy.run_path(str(ROOT / "tools" / "draw_chart.py"))
MEASURED = FRONT_PAGE["measurements"]()


def figures_of(measured) -> tuple[str, ...]:
    """A measurement as tables show it: report, seconds, memory of a GPU and of the host, TB a day."""
    memory = (f"{measured.seconds:.1f}", f"{measured.gpu:.1f}", f"{measured.host:.1f}")
    return measured.report, *memory, f"{measured.written_tb_a_day:.0f}"


def tables_of(page: Path) -> Iterator[list[str]]:
    """The cells of each row of its tables, with the addresses of links that the page's end defines."""
    text = page.read_text(encoding="utf-8")
    defined = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.M))
    for line in text.splitlines():
        if line.startswith("|"):
            linked = re.sub(r"\]\[([^\]]+)\]", lambda match: f"]({defined[match[1]]})", line)
            yield [cell.strip() for cell in linked.strip("|").split("|")]


def measured_rows(page: Path) -> list[tuple[str, ...]]:
    """The rows of *page* whose third to sixth cells are figures, the first with a link."""
    found = []
    for row in tables_of(page):
        linked = re.fullmatch(r"\[([\d.]+)\]\(\S*/reports/(\S+)\)", row[2 if row[2:] else 0])
        if linked:
            found.append((linked[2], linked[1], *(cell.removesuffix(" each") for cell in row[3:6])))
    return found


def test_the_chart_is_drawn_from_the_reports():
    chart = FRONT_PAGE["CHART"].read_text(encoding="utf-8")
    assert chart == FRONT_PAGE["svg"](MEASURED), "run tools/draw_chart.py"
    for group in FRONT_PAGE["GROUPS"].values():
        for bar in group:
            assert f">{MEASURED[bar.name].seconds:.1f} s<" in chart


def test_the_table_of_the_readme_has_the_figures_of_the_reports():
    rows = measured_rows(ROOT / "README.md")
    assert sorted(rows) == sorted(map(figures_of, MEASURED.values()))


def test_the_comparison_has_the_figures_of_the_reports():
    shown = {row[1:] for row in map(figures_of, MEASURED.values())}
    rows = [
        (*re.findall(r"^\[([\d.]+)\]", row[1]), *(c.removesuffix(" each") for c in row[2:5]))
        for row in tables_of(ROOT / "docs" / "comparison.md")
        if len(row) == 6 and "/reports/" in row[1]
    ]
    assert len(rows) == len(MEASURED) - 3  # without the 8B, the 33B and the 70B
    assert {*rows} <= shown


def test_the_other_optimizers_of_the_comparison_have_the_figures_of_the_report():
    columns = ("seconds of the steps, from the second", "GPU, GB", "host memory, GB")
    rows = [
        row
        for row in tables_of(ROOT / "docs" / "comparison.md")
        if re.match(r"(torchao|bitsandbytes) \d", row[0])
    ]
    assert len(rows) == 3
    for title, seconds, *memory, _ in rows:
        ((steps, *found),) = FRONT_PAGE["rows"]("host-memory-h200.md", title, *columns)
        _, *settled = [float(one.strip("()")) for one in steps.split(", ")]
        assert seconds == f"{statistics.median(settled):.1f}"
        assert memory == found


def test_the_other_models_of_the_comparison_have_the_figures_of_the_reports():
    report = FRONT_PAGE["tables"]("systems-h100.md")
    rows = [
        row for row in tables_of(ROOT / "docs" / "comparison.md") if re.match("3B:|13B:", row[0])
    ]
    assert len(rows) == 6
    for title, seconds, *memory in rows:
        (head, *body), *_ = (
            table
            for table in report
            if re.match("Llama 3.2 3B," if title.startswith("3B") else "Llama 2 13B,", table[0][0])
        )
        columns = [head.index(name) for name in ("s a step", "GPU, GB", "host memory, GB")]
        measured = [[row[column] for column in columns] for row in body]
        (found,) = (row for row in measured if row[1] == memory[0])
        assert found[2] == ("" if memory[1] == "unknown" else memory[1]), title
        shown = re.findall(r"[\d.]+", seconds)[0]
        assert float(shown) == pytest.approx(float(found[0]), abs=0.05), title


def test_the_sentences_of_the_readme_have_figures_of_its_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^[|\[].*", "", text, flags=re.M)
    seconds = {figures_of(each)[1] for each in MEASURED.values()}
    memory = {cell for each in MEASURED.values() for cell in figures_of(each)[2:4]}
    assert {*re.findall(r"([\d.]+) s\b", text)} <= seconds
    assert {*re.findall(r"([\d.]+) GB\b(?!/s)", text)} <= memory
    wear_of = r"At (\d+) TB a day, a drive rated for ([\d,]+) TBW lasts (\d+) days"
    ((wear, rated, days),) = re.findall(wear_of, text)
    assert wear in {figures_of(each)[4] for each in MEASURED.values()}
    assert int(days) == int(rated.replace(",", "")) // int(wear)


def test_the_wear_in_the_faq_is_computed_from_the_reports():
    rows = [row for row in tables_of(ROOT / "docs" / "faq.md") if len(row) == 4 and "]" in row[0]]
    for name, row in zip(("drive", "8b-exact", "all-on-drive"), rows, strict=True):
        measured = MEASURED[name]
        assert f"reports/{measured.report})" in row[0]
        assert row[1:] == [
            f"{measured.written:.1f} GB",
            f"{measured.written_tb_a_day:.0f} TB",
            f"{1200 / measured.written_tb_a_day:.1f}",
        ]


def sides(block: Block) -> tuple[str, str]:
    """The code of a diff without and with its change."""
    lines = block.text.splitlines()
    assert {line[:1] for line in lines} <= {"+", "-", " "}
    before = "\n".join(line[1:] for line in lines if line[0] != "+")
    after = "\n".join(line[1:] for line in lines if line[0] != "-")
    return before, after


def weights_after(code: str) -> list[torch.Tensor]:
    """Of a small model that *code* trains on a `loader`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    names = {"torch": torch, "model": model, "loader": torch.randn(4, 8, 64)}
    exec(compile(code, "README.md", "exec"), names)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_loop_of_the_readme_trains_to_the_same_bits_with_its_changes(tmp_path):
    """`tests/examples/test_front_page.py` runs the Trainer and DeepSpeed."""
    diffs = [block for block in BLOCKS if block.language == "diff"]
    ((before, after),) = (sides(block) for block in diffs if "step()" in block.text)
    ((same, streamed),) = (sides(block) for block in diffs if "offload.parameters" in block.text)
    assert before.startswith(same)
    streamed = before.replace(same, streamed)
    for here, there in (("100GB", "8MB"), ('"cuda"', '"cpu"')):
        assert here in streamed
        streamed = streamed.replace(here, there)
    wanted = weights_after(before)
    for change in (after, streamed):
        found = weights_after(change.replace("/local_nvme", str(tmp_path)))
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_the_plan_in_the_readme_is_what_the_command_prints(monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Does it fit?")[2]
    command, shown = re.findall(r"^```\w+\n(.*?)^```$", readme, re.M | re.S)[:2]
    monkeypatch.setenv("COLUMNS", "100")
    words = shlex.split(command.replace("\\\n", ""))
    printed = CliRunner().invoke(nvme_offload_command, words[1:]).output
    missing = [line for line in shown.splitlines() if line not in printed.splitlines()]
    assert not missing, f"{command}prints:\n{printed}"


def test_the_architecture_names_every_part_and_only_files_that_exist():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = ROOT / "nvme_offload"
    table = page.partition("| part |")[2].partition("\n\n")[0]
    parts = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()} | {
        path.name for path in package.glob("[a-z]*.py")
    }
    assert (
        set(
            re.findall(
                r"`([a-z0-9_]+(?:/|\.py))`",
                "\n".join(line.split("|")[1] for line in table.splitlines()[2:]),
            )
        )
        == parts
    )
    answers = page.partition("## Where to look")[2].partition("## Words")[0]
    named = re.findall(r"`([a-z0-9_]+/[a-z0-9_]+\.(?:py|cpp|h))`", answers)
    assert len(named) > 10
    assert [
        name for name in named if not (package / name).exists() and not (ROOT / name).exists()
    ] == []


def test_every_page_is_reached_from_the_readme():
    targets = {file_of(ROOT / "README.md", target)[0] for target in links_of(ROOT / "README.md")}
    assert {page for page in PAGES if page.parent == ROOT / "docs"} - targets == set()


BUILD_DOCS = runpy.run_path(str(ROOT / "tools" / "build_docs.py"))


def callables_of(module: str) -> Iterator[tuple[str, Callable[..., object]]]:
    """The public classes, methods and functions that the API reference shows for *module*."""
    within = importlib.import_module(module)
    for name in BUILD_DOCS["public_names"](within):
        found = getattr(within, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            yield name, found
        for member in vars(found) if inspect.isclass(found) else ():
            value = getattr(found, member)
            if not member.startswith("_") and inspect.isroutine(value):
                yield f"{name}.{member}", value


def parameters_of(found: Callable[..., object]) -> set[str]:
    """The names of its public parameters; of a class, its constructor's."""
    if inspect.isclass(found):
        made_by = [each for each in (found.__init__, found.__new__) if inspect.isfunction(each)]
        if not made_by:  # a built-in one, as an exception's
            return set()
        found = made_by[0]
    names = inspect.signature(found).parameters
    return {name for name in names if name not in ("self", "cls") and not name.startswith("_")}


def named_in(section: str, docstring: str) -> set[str]:
    """The names that a section of a numpydoc docstring describes."""
    text = re.search(rf"^{section}\n-+\n(.*?)(?=^\S[^\n]*\n-+$|\Z)", docstring, re.M | re.S)
    lines = re.findall(r"^\S.*", text[1], re.M) if text else []
    return {name.strip(" *") for line in lines for name in line.partition(" : ")[0].split(",")}


def bases_of(found: Callable[..., object]) -> Sequence[object]:
    """A class and the classes whose fields it inherits; any other object alone."""
    return found.__mro__[:-1] if inspect.isclass(found) else [found]


def mentioned_in(found: object) -> set[str]:
    """The names that the docstring of *found* itself has under Attributes, or in its sentences."""
    docstring = inspect.cleandoc(found.__doc__ or "")
    return named_in("Attributes", docstring) | set(re.findall(r"\*(\w+)\*", docstring))


@pytest.mark.parametrize("module", BUILD_DOCS["documented_modules"]())
def test_a_docstring_describes_every_parameter_by_its_name(module):
    missing, unknown = {}, {}
    for name, found in callables_of(module):
        docstring, parameters = inspect.getdoc(found) or "", parameters_of(found)
        described = named_in("Parameters", docstring)
        missing[name] = parameters - described - set().union(*map(mentioned_in, bases_of(found)))
        unknown[name] = described - parameters
    assert {name: each for name, each in missing.items() if each} == {}
    assert {name: each for name, each in unknown.items() if each} == {}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages as `make docs` builds them, which fails where a link leads nowhere."""
    for module in ("sphinx", "myst_parser", "furo", "numpydoc"):
        pytest.importorskip(module, reason=f"{module} is not installed here")
    into = tmp_path_factory.mktemp("docs") / "site"
    done = finished([sys.executable, ROOT / "tools" / "build_docs.py", into])
    assert (done.returncode, done.stderr) == (0, "")
    return into


@pytest.mark.slow
def test_the_site_has_every_page_and_every_public_name(site):
    first = (site / "index.html").read_text(encoding="utf-8")
    for page in PAGES:
        if page.parent == ROOT / "docs":
            assert (site / f"{page.stem}.html").exists()
            assert f'href="{page.stem}.html"' in first
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    package = importlib.import_module("nvme_offload")
    for name in package.__all__:
        found = getattr(package, name)
        anchor = f'id="{found.__module__}.{found.__qualname__}"'
        # names that a package's __init__ imports have their anchors there
        short = f'id="{found.__module__.rpartition(".")[0]}.{found.__qualname__}"'
        assert any(anchor in text or short in text for text in pages.values()), name
    overview = pages[site / "api" / "index.html"]
    assert 'href="pytorch.html#nvme_offload.optim.NVMeOptimizer"' in overview
    assert 'href="engine.html#nvme_offload.io.engine.Engine"' in overview


@pytest.mark.slow
def test_the_site_fetches_nothing_and_its_links_lead_somewhere(site):
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    for path, text in pages.items():
        assert not re.search(r'src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//|@import', text)
        for target in re.findall(r'<a [^>]*href="([^"]+)"', text):
            if found := file_of(path, html.unescape(target)):
                file, anchor = found
                assert file.exists(), f"{path.name} leads to {target}"
                if anchor and file in pages:
                    assert f'id="{anchor}"' in pages[file], f"{path.name} leads to {target}"
