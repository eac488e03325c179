"""Who may import whom, and that importing stays cheap."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

from processes import finished

PACKAGE = Path(__file__).parents[2] / "nvme_offload"
MODULES = sorted(PACKAGE.rglob("*.py"))

# The parts of the package, each a module or a folder right under it, with the parts that it may
# import besides itself.
LEAVES = {"errors", "sizes", "units"}
HOST = LEAVES | {"files", "hardware"}
MOVING = HOST | {"io", "store", "swap"}
MAY_IMPORT = {
    "__init__": {"activations", "errors", "hardware", "io", "offload", "optim", "store", "swap"},
    "sizes": set(),
    "units": set(),
    "errors": {"units"},
    "extension": {"_aio", "errors"},
    "files": set(),
    "hardware": LEAVES | {"files"},
    "ds_config": HOST,
    "planning": HOST | {"ds_config"},
    "io": HOST | {"extension"},
    "store": HOST | {"io"},
    "swap": HOST | {"io", "store"},
    "optimizer_states": LEAVES | {"extension"},
    "optim": MOVING | {"device", "optimizer_states", "parameters", "update"},
    "activations": MOVING | {"device"},
    "parameters": MOVING | {"device"},
    "offload": MOVING | {"activations", "optim", "parameters", "update"},
    "device": MOVING | {"optimizer_states"},
    "update": MOVING | {"device", "optimizer_states"},
    "zero3": MOVING | {"device", "ds_config", "optimizer_states", "planning", "update"},
    "report": HOST | {"ds_config", "planning"},
    "tune": HOST | {"ds_config", "io", "planning", "report"},
    "commands": HOST | {"ds_config", "io", "optimizer_states", "planning", "zero3"},
}
# What needs the standard library alone, but for this package.
PURE = sorted({"errors", "sizes", "units", "files", "hardware", "ds_config", "planning"})
PURE_MODULES = {
    "io/arguments.py",
    "io/extents.py",
    "swap/access_order.py",
    "swap/arena.py",
    "swap/drive_use.py",
    "swap/live.py",
    "swap/value_states.py",
}
# Slow to import, or not always there: imported where they are used, never when a module is loaded.
LAZY = {"torch", "triton", "deepspeed", "jinja2"}
# Except in these, which stand in for classes of torch and DeepSpeed: imported by `enable()`, or at
# the first use of `NVMeOptimizer` or `save_on_nvme`.
_ZERO3 = (
    "agreement",
    "checkpoint",
    "checkpoint_engines",
    "checkpoint_load",
    "cpu_adam",
    "fragments",
    "gradients",
    "in_backward",
    "op",
    "once_per_step",
    "optimizer_swapper",
    "overlap",
    "param_swapper",
    "stage3_access",
    "stage3_gradients",
    "stage3_sub_groups",
    "sub_groups",
    "tiered",
    "reader",
    "stage3",
    "stage_1_and_2",
    "stages",
    "states",
    "update_device",
    "updates",
)
ON_FIRST_USE = {f"zero3/{name}.py" for name in _ZERO3} | {
    f"{room}/{path.name}"
    for room in ("activations", "device", "optim", "optimizer_states", "parameters")
    for path in (PACKAGE / room).glob("*.py")
}
ON_FIRST_USE |= {f"update/{name}.py" for name in ("gradients", "records")}
ON_FIRST_USE.add("io/archive.py")


@dataclasses.dataclass(frozen=True)
class Import:
    name: str
    line: int
    when_loaded: bool

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]

    @property
    def part(self) -> str:
        """The part of this package that is imported; "__init__" for the package itself."""
        return self.name.split(".")[1] if "." in self.name else "__init__"


def imports_of(source: str, module: str) -> Iterator[Import]:
    """Every import in *source*, the text of *module* ("nvme_offload.tune.cli"), except those made
    for type checkers only.
    """
    package = module.split(".")[:-1]

    def walk(node: ast.AST, when_loaded: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, when_loaded)
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield Import(f"{origin}.{alias.name}", node.lineno, when_loaded)
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, when_loaded and not inside_function)

    yield from walk(ast.parse(source), True)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_in(path: Path) -> list[Import]:
    module = ".".join(("nvme_offload", *path.relative_to(PACKAGE).with_suffix("").parts))
    return list(imports_of(path.read_text(encoding="utf-8"), module))


@functools.cache
def imports_of_the_package() -> dict[Path, list[Import]]:
    return {path: imports_in(path) for path in MODULES}


def test_a_part_imports_only_the_parts_that_it_may():
    for path, imports in imports_of_the_package().items():
        part = part_of(path)
        assert part in MAY_IMPORT, f"{part} is new: add a row to MAY_IMPORT"
        # The package itself is its version, which everyone may ask for.
        allowed = MAY_IMPORT[part] | {part, "__init__", "__version__"}
        assert [
            found for found in imports if found.root == "nvme_offload" and found.part not in allowed
        ] == [], path


def test_what_is_slow_is_imported_where_it_is_used():
    for path, imports in imports_of_the_package().items():
        name = str(path.relative_to(PACKAGE))
        lazy = LAZY - {"torch", "triton", "deepspeed"} if name in ON_FIRST_USE else LAZY
        assert [found for found in imports if found.when_loaded and found.root in lazy] == [], name


def module_of(path: Path) -> str:
    return ".".join(
        ("nvme_offload", *path.relative_to(PACKAGE).with_suffix("").parts)
    ).removesuffix(".__init__")


def test_no_module_of_a_room_imports_itself_by_way_of_others():
    for room in MAY_IMPORT:
        inside = {module_of(path): path for path in MODULES if part_of(path) == room}
        used = {
            module: {
                found.name if found.name in inside else found.name.rpartition(".")[0]
                for found in imports_of_the_package()[path]
            }
            & inside.keys() - {module}
            for module, path in inside.items()
        }
        # or it raises a CycleError with the circle
        assert len(list(graphlib.TopologicalSorter(used).static_order())) == len(inside)


def test_no_part_imports_itself_by_way_of_others():
    used = {part: set() for part in MAY_IMPORT}
    for path in MODULES:
        used[part_of(path)] |= {
            found.part for found in imports_of_the_package()[path] if found.root == "nvme_offload"
        } - {part_of(path), "__init__", "__version__"}
    # or it raises a CycleError with the circle
    assert list(graphlib.TopologicalSorter(used).static_order())


def test_a_pure_module_needs_only_the_standard_library():
    for path, imports in imports_of_the_package().items():
        if part_of(path) in PURE or str(path.relative_to(PACKAGE)) in PURE_MODULES:
            roots = {found.root for found in imports}
            assert roots - {"nvme_offload", *sys.stdlib_module_names} == set(), path


def test_the_sweep_never_needs_torch():
    # Nodes talk by torch's store, under a launcher that torch or DeepSpeed brought.
    for path, imports in imports_of_the_package().items():
        if part_of(path) == "tune" and path.name != "launcher.py":
            assert "torch" not in {found.root for found in imports}, path


def test_loading_stays_light_and_public_names_are_there_on_first_use():
    code = """
import sys
import nvme_offload, nvme_offload.commands.cli, nvme_offload.planning.plan, nvme_offload.tune.cli
print({"torch", "numpy", "deepspeed"} & set(sys.modules))
missing = [name for name in nvme_offload.__all__ if not hasattr(nvme_offload, name)]
print(missing, set(nvme_offload.__all__) - set(dir(nvme_offload)), nvme_offload.errors.UsageError is nvme_offload.UsageError)
try:
    nvme_offload.nothing
except AttributeError as error:
    print(error)
"""
    done = finished([sys.executable, "-W", "error", "-c", code])
    assert done.stdout == (
        "set()\n[] set() True\nmodule 'nvme_offload' has no attribute 'nothing'\n"
    ), done.stderr
