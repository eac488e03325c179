"""What a newcomer meets: the README's commands, the set-up behind them, and the build's one line
where a header is missing.
"""

from __future__ import annotations

import email
import functools
import http.server
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import threading
import venv
import zipfile
from pathlib import Path

import pytest
from processes import finished

import nvme_offload

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_project(tmp_path):
    """A project with our .ci/run, a README, and a Makefile that prints the requested targets."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "Makefile").write_text(
        "test-slow:\n\t@echo slow $(ARGS)\n\ntest-portable:\n\t@echo portable $(ARGS)\n"
    )
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")

    def write(second_command: str) -> Path:
        (tmp_path / "README.md").write_text(
            f"# x\n```sh\nexit 9\n```\n## Quick start\n```sh\nexit 8\n```\ntext\n```sh\n{second_command}\n```\n## More\n```sh\nexit 7\n```\n"
        )
        return tmp_path / ".ci" / "run"

    return write


@pytest.mark.parametrize("code", [0, 3])
def test_ci_runs_the_second_command_and_then_the_rest_and_exits_as_the_first_that_fails(
    small_project, code
):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))
    }
    done = finished([small_project(f"pwd\n(exit {code})")], cwd="/", env=environment)
    assert (done.returncode, done.stderr) == (code, "")
    place, *rest = done.stdout.splitlines()
    assert Path(place).samefile(small_project("").parents[1])
    assert rest == ([] if code else ["slow", "portable -m processor and not slow"])


def test_ci_stops_at_the_first_failure_of_the_command(small_project):
    done = finished([small_project("false\necho went on")])
    assert (done.returncode, done.stdout) == (1, "")


def test_ci_says_when_there_is_no_command(small_project):
    done = finished([small_project("")])
    assert (done.returncode, done.stderr) == (
        1,
        "README.md has no second command under 'Quick start'\n",
    )


def test_bare_make_lists_every_target():
    listing = finished(["make"], check=True, cwd=ROOT, env={**os.environ, "MAKEFLAGS": ""}).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert re.findall(r"^  make (\S+) +\S", listing, re.MULTILINE) == phony


@pytest.fixture
def compiler_without(tmp_path):
    """A compiler that finds every header but one."""

    def write(header: str) -> str:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\ncase $(cat) in *'<{header}>'*) exit 1 ;; esac\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_a_build_without_a_compiler_ends_in_one_line(compiler_without):
    pytest.importorskip("setuptools", reason="setuptools is not installed in this environment")
    environment = {**os.environ, "CXX": compiler_without("string")}
    done = finished([sys.executable, "setup.py", "build_ext"], cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        "nvme-offload: no working C++ compiler; install g++ (Debian, Ubuntu), gcc-c++ (Fedora, RHEL) "
        "or, without root, conda-forge's cxx-compiler, or set CXX\n",
    )


def test_the_extension_needs_no_library_but_libc():
    spec = importlib.util.find_spec("nvme_offload._aio")
    needed = set(re.findall(rb"\0(lib[\w+-]+)\.so[.\d]*(?=\0)", Path(spec.origin).read_bytes()))
    if needed & {b"libasan", b"libtsan"}:
        pytest.skip("this build has sanitizers, which need the shared libstdc++")
    archive = finished(["c++", "-print-file-name=libstdc++.a"]).stdout
    shared = set() if archive.startswith("/") else {b"libstdc++"}
    assert needed <= {b"libc", b"libm", b"libdl", b"libpthread", b"libgcc_s", b"libc++"} | shared


BROKEN = """
import sys
sys.modules["nvme_offload._aio"] = None  # which makes its import fail
import nvme_offload
from nvme_offload.errors import UnsupportedError
from nvme_offload.tune.cli import main
for name in ("Engine", "NVMeOptimizer"):
    try:
        getattr(nvme_offload, name)
    except UnsupportedError as error:
        print(error)
sys.argv[1:] = ["."]
assert main() == 1
"""


def test_an_extension_that_does_not_load_is_one_error_with_a_remedy(tmp_path):
    done = finished(
        [sys.executable, "-c", BROKEN], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "compiled part of nvme_offload does not load: import of nvme_offload._aio" in line
        assert "build it again with this Python: pip install" in line


@pytest.mark.slow
def test_set_up_leaves_the_users_torch_alone(tmp_path):
    """.venv sees a torch that the user's environment has, and pip is not asked for another."""
    venv.create(tmp_path / "mine")
    packages = sysconfig.get_path(
        "purelib", vars={"base": str(tmp_path / "mine"), "platbase": str(tmp_path / "mine")}
    )
    (Path(packages) / "torch.py").write_text("mine = True\n")
    project = tmp_path / "project"
    for name in (
        "tools/setup-env",
        "pyproject.toml",
        "setup.py",
        "nvme_offload/__init__.py",
        "aio/module.cpp",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, project / name)

    # Without an index pip cannot go on to build the package: the set-up ends there, after torch was
    # decided on.
    environment = {**os.environ, "PYTHON": str(tmp_path / "mine/bin/python"), "PIP_NO_INDEX": "1"}
    environment = {
        name: value
        for name, value in environment.items()
        if name not in ("PIP_FIND_LINKS", "TORCH")
    }
    done = finished([project / "tools/setup-env"], env=environment)

    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("setup: ")]
    assert said[-2:] == [
        f"setup: using the torch of {tmp_path}/mine/bin/python",
        "setup: building nvme-offload",
    ]
    seen = finished(
        [project / ".venv/bin/python", "-c", "import torch; print(torch.__file__)"], check=True
    )
    assert seen.stdout == f"{packages}/torch.py\n"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """What `make wheel` builds, for this Python; it tries the wheel alone, without compilers."""
    for module in ("build", "ziglang", "auditwheel", "pybind11", "setuptools"):
        pytest.importorskip(module, reason=f"{module} is not installed here")
    into = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        ROOT / "tools" / "build_wheels.py",
        "--no-isolation",
        "--into",
        into,
        sys.executable,
    ]
    done = finished(command)
    if "not found below" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.returncode, done.stderr) == (0, "")
    assert "libaio works" in done.stdout
    (wheel,), (source,) = into.glob("*.whl"), into.glob("*.tar.gz")
    return wheel, source


@pytest.mark.slow
def test_a_portable_wheel_needs_no_library_and_carries_licences(distributions):
    wheel, _ = distributions
    assert re.fullmatch(r"nvme_offload-.*[-.]manylinux_2_\d+_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (extension,) = (
            archive.read(name) for name in names if re.match(r"nvme_offload/_aio\..*\.so", name)
        )
        (record,) = (name for name in names if name.endswith("THIRD-PARTY.txt"))
        reported = archive.read(record).decode()
    # RHEL 8, and torch's own wheels
    assert max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", extension)) <= 28
    assert b"GLIBCXX" not in extension
    assert not [name for name in names if name.startswith("nvme_offload.libs/")]
    assert all(word in reported for word in ("xxHash", "pybind11", "LLVM"))
    assert {
        "nvme_offload/_aio.pyi",
        "nvme_offload/commands/startup/sitecustomize.py",
        "nvme_offload/commands/templates/script.py.j2",
        "nvme_offload/py.typed",
        "nvme_offload/report/templates/report.html.j2",
    } <= set(names)
    assert not any(name.startswith(("tests/", "sweeps/", "tools/")) for name in names)


@pytest.mark.slow
def test_the_distributions_are_ready_for_an_index(distributions):
    pytest.importorskip("twine", reason="twine is not installed here")
    done = finished([sys.executable, "-m", "twine", "check", "--strict", *distributions])
    assert (done.returncode, done.stdout.count("PASSED")) == (0, 2), done.stdout
    wheel, _ = distributions
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata.get_payload(decode=True).decode().strip() == readme.strip()
    markdown = pytest.importorskip("readme_renderer.markdown", reason="twine brings it along")
    shown = markdown.render(readme)
    if shown is None:
        pytest.skip("readme-renderer is here without its extra for Markdown")
    assert shown.count("<table>") == 1
    prose = re.sub(r"<pre.*?</pre>", "", shown, flags=re.DOTALL)
    assert "][" not in prose, "a link has no address"
    assert len(re.findall(r'<img src="https://github.com/[^"]*\.svg"', shown)) == 1
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}


@pytest.fixture
def fresh_environment(tmp_path):
    """The Python of a new environment that sees what the package depends on, and not the package;
    its pip is this environment's.
    """
    venv.create(tmp_path / "fresh", symlinks=True)
    seen = tmp_path / "seen"
    seen.mkdir()
    for folder in map(Path, sys.path):
        if folder.name.endswith("-packages"):
            for entry in folder.iterdir():
                if "nvme_offload" not in entry.name and entry.suffix != ".pth":
                    link = seen / entry.name
                    if not link.is_symlink():
                        link.symlink_to(entry)
    python = tmp_path / "fresh" / "bin" / "python"
    command = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = finished([python, "-c", command], check=True)
    (Path(packages.stdout.strip()) / "seen.pth").write_text(f"{seen}\n")
    return python


@pytest.mark.slow
def test_a_wheel_is_installed_from_an_index_where_there_is_no_compiler(
    distributions, fresh_environment, tmp_path
):
    """pip installs it from a local index, and its command, engine and libraries work."""
    project = tmp_path / "index" / "nvme-offload"
    project.mkdir(parents=True)
    for path in distributions:
        shutil.copy(path, project)
    handler = functools.partial(SilentHandler, directory=tmp_path / "index")
    environment = {"PATH": str(fresh_environment.parent), "HOME": str(tmp_path)}
    for compiler in ("cc", "c++", "gcc", "g++", "clang"):
        assert shutil.which(compiler, path=environment["PATH"]) is None

    def run(*command: str | Path) -> str:
        done = finished(command, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}/"
        pip = [fresh_environment, "-m", "pip", "--disable-pip-version-check", "--isolated"]
        run(*pip, "install", "--no-cache-dir", "--index-url", index, "nvme-offload")
        server.shutdown()
    place = run(fresh_environment, "-c", "import nvme_offload; print(nvme_offload.__file__)")
    assert Path(place).is_relative_to(tmp_path / "fresh")
    assert "Usage: nvme-sweep" in run(fresh_environment.with_name("nvme-sweep"), "--help")
    assert "libaio works" in run(fresh_environment, ROOT / "tools" / "check_wheel.py")


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a directory of distributions as an index does, and logs nothing."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.mark.slow
def test_a_portable_wheel_lets_the_interpreter_end(distributions, tmp_path):
    """Its C++ library is another than the build in place has, and so is what becomes of threads
    that wait at the end.
    """
    wheel, _ = distributions
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    tests = [ROOT / "tests" / "unit" / "test_engine_lifetime.py", "-k", "stalls or ctrl_c_ended"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = finished(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout


def test_a_wheel_for_another_machine_wants_its_headers(tmp_path):
    pytest.importorskip("ziglang", reason="ziglang is not installed here")
    command = [
        sys.executable,
        ROOT / "tools" / "build_wheels.py",
        "--machine",
        "aarch64",
        "--sysroot",
        tmp_path,
        "--into",
        tmp_path / "dist",
        sys.executable,
    ]
    done = finished(command)
    assert done.returncode == 1
    assert done.stderr.startswith(f"wheels: xxhash.h not found below {tmp_path};")
    assert not (tmp_path / "dist").exists()


@pytest.mark.slow
def test_the_source_distribution_has_what_git_has(distributions):
    tracked = finished(["git", "ls-files"], cwd=ROOT)
    if tracked.returncode:
        pytest.skip("this is no clone")
    _, source = distributions
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    left_out = {".gitignore", ".pre-commit-config.yaml"}
    assert {
        name for name in tracked.stdout.splitlines() if (ROOT / name).exists()
    } - left_out <= packed


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed here")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == nvme_offload.__version__
    assert citation["license"] == "Apache-2.0"
    # what the schema of that version wants
    assert {"authors", "cff-version", "message", "title"} <= set(citation)


def test_the_installed_package_says_what_it_is():
    metadata = importlib.metadata.metadata("nvme-offload")
    assert metadata["Version"] == nvme_offload.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    requirements = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert sorted(requirements) == ["click", "jinja2", "numpy", "torch"]
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="nvme-sweep")
    assert command.value == "nvme_offload.tune.cli:main"
