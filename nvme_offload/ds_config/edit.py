"""A DeepSpeed config file, edited as text: its `aio` section is set, and every other byte stays.

DeepSpeed 0.19.8 reads the file with hjson (`DeepSpeedConfig.__init__` in
deepspeed/runtime/config.py) and refuses duplicate keys. So a config may hold comments, trailing
commas, keys and strings without quotes, or no outer braces, which no JSON writer would give back.
The text is therefore read once into nodes that know their places (hjson_reader.py), and an edit
replaces or inserts at such places only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import commit
from ..hardware.config import AioConfig
from ..hardware.profile import Profile, Setting
from .hjson_reader import STOP, Member, Node, Reader

# DeepSpeed's key for each of our names (deepspeed/runtime/swap_tensor/constants.py).
# `thread_count`, which its documentation and Lightning write, is not read.
_OUR_NAMES = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "intra_op_parallelism": "thread_count",
    "single_submit": "single_submit",
    "overlap_events": "overlap_events",
}
# A plain, a 'single' or a "double" quoted scalar; what `accelerate config` writes is of the first
# kind.
_YAML_FILE = re.compile(
    r"""^[ \t]+deepspeed_config_file:[ \t]+(?:'([^'\n]+)'|"([^"\\\n]+)"|([^\s'"#{\[&*!|>%@][^\n]*?))[ \t]*(?:[ \t]#.*)?$""",
    re.MULTILINE,
)
_FLAGS = ("single_submit", "overlap_events")
# What DeepSpeed takes where the section says nothing (deepspeed/runtime/swap_tensor/constants.py).
DEEPSPEED_AIO: dict[str, int | bool] = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
_READ_BY_DEEPSPEED = (*_OUR_NAMES, "use_gds")


@dataclasses.dataclass(frozen=True)
class Applied:
    """What `apply` did to a file.

    path: as it was given. changed: False when the file already said so and was not written.
    settings: the keys that the `aio` section holds now. before: those of them that were there, with
    their old values. ignored: keys of the section that DeepSpeed does not read, such as
    `thread_count`; they were left as they are.
    """

    path: Path
    changed: bool
    settings: dict[str, int | bool]
    before: dict[str, Any]
    ignored: tuple[str, ...]


def aio_section(
    setting: Profile | Setting | AioConfig | Mapping[str, Any],
) -> dict[str, int | bool]:
    """*setting* in DeepSpeed's keys: what belongs in its `aio` section.

    Shapes: a profile gives its chosen setting; a mapping is in DeepSpeed's keys already, any number
    of them, and is checked. Units: block_size in bytes. Raises: UsageError for a key that DeepSpeed
    does not read or a value that it would not take. Source:
    deepspeed/runtime/swap_tensor/aio_config.py.
    """
    if isinstance(setting, Profile):
        setting = setting.chosen
    if not isinstance(setting, Mapping):
        setting = {key: getattr(setting, name) for key, name in _OUR_NAMES.items()}
    for key, value in setting.items():
        if key not in _OUR_NAMES:
            hint = (
                "; DeepSpeed calls it intra_op_parallelism"
                if key in ("thread_count", "num_threads")
                else ""
            )
            raise UsageError(
                f"{key!r} cannot be set in the aio section, only {', '.join(_OUR_NAMES)}{hint}"
            )
        if key in _FLAGS and not isinstance(value, bool):
            raise UsageError(f"aio.{key} must be true or false, not {value!r}")
        if key not in _FLAGS and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise UsageError(f"aio.{key} must be a whole number from 1, not {value!r}")
    if not setting:
        raise UsageError(
            "there is nothing to set in the aio section; give at least one of "
            + ", ".join(_OUR_NAMES)
        )
    return {key: setting[key] for key in _OUR_NAMES if key in setting}


def zero_infinity(
    aio: Profile | Setting | AioConfig | Mapping[str, Any], nvme_path: str | Path
) -> str:
    """The text of a config for ZeRO-Infinity, parameters and optimizer states on *nvme_path*: plain
    JSON that DeepSpeed takes as it stands.

    `max_in_cpu` is 0, or DeepSpeed would keep the first billion parameters in host memory.
    `pipeline_read` and `pipeline_write` stay off, because with them `zero_to_fp32` collates wrong
    weights. Batch size, optimizer and learning rate (DeepSpeed's default) are there to be edited.
    Lightning takes it too: it refuses a `gradient_accumulation_steps`, and its `test` and `predict`
    fail without `zero_allow_untested_optimizer`.

    Units: max_in_cpu and buffer_size in elements. Shapes: *nvme_path* is written as given, so give
    an absolute one. Raises: UsageError, as `aio_section`. Source:
    deepspeed/runtime/zero/offload_config.py.
    """
    offload = {"device": "nvme", "nvme_path": os.fspath(nvme_path), "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                **offload,
                "buffer_count": 5,
                "buffer_size": 100_000_000,
                "max_in_cpu": 0,
            },
            "offload_optimizer": {**offload, "buffer_count": 4},
        },
        "aio": aio_section(aio),
    }
    return json.dumps(config, indent=2) + "\n"


def apply(path: str | Path, settings: Profile | Setting | AioConfig | Mapping[str, Any]) -> Applied:
    """Set *settings* in the `aio` section of the DeepSpeed config *path* and leave every other byte
    as it is.

    A file that already says so is not written. Otherwise the new text is written aside in the same
    directory, synced and renamed, so that a crash leaves the old file or the new one. Mode, owner
    and a symlink that leads to the file are kept. Where a new file would lack something (an ACL,
    extended attributes, a second hard link, an owner who is not this user) or cannot be renamed to
    (a bind mount), the file is written in place, with its old text in `.NAME.before` beside it
    until that is synced.

    Raises: UsageError, with file, line and column, when *path* is no file or not one that DeepSpeed
    would read; OSError when it cannot be written. The file is untouched then. Source: rename(2),
    fsync(2).
    """
    path = Path(path)
    wanted = aio_section(settings)
    text = _read_text(path)
    commit.kept_of(path.resolve()).unlink(missing_ok=True)
    with _naming(path):
        edited = edit(text, wanted)
        before = _section_values(Reader(text))
    if edited != text:
        _replace_file(path, edited.encode("utf-8"))
    return Applied(
        path=path,
        changed=edited != text,
        settings=wanted,
        before={key: before[key] for key in wanted if key in before},
        ignored=tuple(key for key in before if key not in _READ_BY_DEEPSPEED),
    )


def read_aio(path: str | Path) -> dict[str, Any]:
    """The `aio` section of the config file *path* as DeepSpeed will read it; empty when there is
    none.

    Raises: UsageError, with file, line and column, when DeepSpeed would not read the file; OSError.
    """
    path = Path(path)
    text = _read_text(path)
    with _naming(path):
        return _section_values(Reader(text))


def read(path: str | Path) -> dict[str, Any]:
    """The whole config file *path* as DeepSpeed will read it. Raises: as `read_aio`."""
    path = Path(path)
    text = _read_text(path)
    with _naming(path):
        return parse(text)


def locate(path: str | Path) -> Path:
    """The DeepSpeed config that *path* leads to: itself, or the file that it names, where it is the
    YAML that `accelerate config` writes.

    Raises: UsageError when it is such a YAML and names none, or the one that it names does not
    exist. Source: accelerate/commands/config/config_args.py and utils/dataclasses.py
    (`deepspeed_config_file`, relative to the working directory).
    """
    path = Path(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        return path
    section = re.search(
        r"^deepspeed_config:[ \t]*(?:#.*)?$((?:\n(?:[ \t].*|[ \t]*#.*|[ \t]*))*)",
        _read_text(path).replace("\r\n", "\n"),
        re.MULTILINE,
    )
    named = _YAML_FILE.search(section[1]) if section else None
    if named is None:
        raise UsageError(
            f"{path} names no DeepSpeed config: an aio section takes a file of its own, so write one and name it there as deepspeed_config_file, "
            "below deepspeed_config"
        )
    name = Path(next(part for part in named.groups() if part is not None)).expanduser()
    places = [name, path.parent / name]
    for place in places:
        if place.exists():
            return place
    raise UsageError(
        f"{path} names the DeepSpeed config {name}, which does not exist; correct its deepspeed_config_file"
    )


def is_writable(path: str | Path) -> bool:
    """Whether `apply` may replace the file: whoever made it or its directory read-only would not
    expect it to change.
    """
    target = Path(path).resolve()
    return (
        bool(target.stat().st_mode & 0o222)
        and os.access(target, os.W_OK)
        and os.access(target.parent, os.W_OK | os.X_OK)
    )


def parse(text: str) -> dict[str, Any]:
    """The config *text* as DeepSpeed reads it: the values that hjson gives.

    Raises: UsageError with line and column when DeepSpeed would refuse it.
    """
    root = Reader(text).root
    return root.value if root else {}


def edit(text: str, aio: Mapping[str, Any]) -> str:
    """*text* with the keys of *aio* set in its `aio` section; text that already says so comes back
    as it is.

    A value is replaced where it is not written as *aio*'s would be: `"8"` and `8.0` become `8`,
    because the latter is not an integer to a reader of plain JSON such as Hugging Face's. Missing
    keys, or a missing section, are added last and in the file's own style.

    Raises: UsageError with line and column when DeepSpeed would refuse *text*, or its `aio` is no
    object.
    """
    wanted = {key: json.dumps(value) for key, value in aio_section(aio).items()}
    reader = Reader(text)
    newline = next(iter(re.findall(r"\r\n|\r|\n", text)), "\n")
    return reader.splice(
        [(start, end, new.replace("\n", newline)) for start, end, new in _edits(reader, wanted)]
    )


# Editing


@dataclasses.dataclass(frozen=True)
class _Style:
    """How an object is written: a member to a line behind *indent*, or all on one line with *gap*
    after each comma.
    """

    lines: bool
    indent: str
    quote: str = '"'
    colon: str = ": "
    gap: str = " "
    comma: str = ","  # between members on lines: hjson needs none

    def member(self, key: str, value: str) -> str:
        return f"{self.quote}{key}{self.quote}{self.colon}{value}"

    def join(self, members: list[str]) -> str:
        return (f"{self.comma}\n{self.indent}" if self.lines else f",{self.gap}").join(members)


def _edits(reader: Reader, wanted: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    """What to replace by what, so that the section says *wanted*, which maps keys to the text of
    their values.
    """
    if reader.root is None:
        style = _Style(lines=True, indent="  ")
        begin = "\n" if reader.text and not reader.text.endswith("\n") else ""
        yield (
            len(reader.text),
            len(reader.text),
            f"{begin}{{\n  {style.member('aio', _new_section(style, '  ', '  ', wanted))}\n}}\n",
        )
        return
    unit = next(_indentations(reader, reader.root), "  ")
    style = _style_of(reader, reader.root, unit, None)
    section = _section(reader)
    if section is None:
        yield from _additions(
            reader,
            reader.root,
            style,
            [style.member("aio", _new_section(style, style.indent, unit, wanted))],
        )
    elif section.node.value is None:
        yield (
            section.node.start,
            section.node.end,
            _new_section(style, reader.indentation(section.start), unit, wanted),
        )
    else:
        for member in section.node.members:
            if member.key in wanted:
                yield from _replacement(reader, member.node, wanted[member.key])
        missing = [key for key in wanted if key not in section.node.value]
        if missing:
            style = _style_of(reader, section.node, unit, style)
            yield from _additions(
                reader, section.node, style, [style.member(key, wanted[key]) for key in missing]
            )


def _replacement(reader: Reader, node: Node, new: str) -> Iterator[tuple[int, int, str]]:
    if reader.text[node.start : node.end] == new:
        return
    follower = node.end + len(reader.text[node.end :]) - len(reader.text[node.end :].lstrip(" \t"))
    # In hjson the next key may follow a quoted value without a comma; behind a number it would be
    # taken for the rest of a string.
    yield node.start, node.end, new if STOP.match(reader.text, follower) else f"{new},"


def _additions(
    reader: Reader, node: Node, style: _Style, members: list[str]
) -> Iterator[tuple[int, int, str]]:
    """Add *members* behind the last of the object *node*."""
    begin = f"\n{style.indent}" if style.lines else ""
    if not node.members:
        start, end = node.inside
        kept = len(reader.text[start:end].rstrip(" \t\n"))
        if not style.lines:
            yield start, start, style.join(members)
        elif "\n" in reader.text[start + kept : end]:
            yield start + kept, start + kept, begin + style.join(members)
        else:
            yield end, end, f"{begin}{style.join(members)}\n{reader.indentation(node.start)}"
        return
    last = node.members[-1]
    at = last.node.end
    if last.comma is not None:
        at = last.comma + 1
    # a comma would become part of a bare string
    elif not last.node.bare and (style.comma or not style.lines):
        yield at, at, ","
    if style.lines:  # a comment behind the last member stays with it
        at = _end_of_remarks(reader, at)
    yield at, at, (begin or style.gap) + style.join(members) + ("" if last.comma is None else ",")


def _end_of_remarks(reader: Reader, at: int) -> int:
    following = at
    while True:
        while reader.text[following : following + 1] in (" ", "\t"):
            following += 1
        after = reader.after_comment(following)
        if after is None:
            return at
        at = following = after


def _new_section(style: _Style, outer: str, unit: str, wanted: Mapping[str, str]) -> str:
    """The text of an `aio` object whose closing brace stands behind *outer*."""
    inner = dataclasses.replace(style, indent=outer + unit)
    members = inner.join([inner.member(key, value) for key, value in wanted.items()])
    return f"{{\n{inner.indent}{members}\n{outer}}}" if style.lines else f"{{{members}}}"


def _style_of(reader: Reader, node: Node, unit: str, parent: _Style | None) -> _Style:
    """The style of the object *node*, read off its last member; an empty one takes after
    *parent*.
    """
    text, outer = reader.text, reader.indentation(node.start)
    if not node.members:
        lines = parent is None or parent.lines or "\n" in text[slice(*node.inside)]
        return dataclasses.replace(
            parent or _Style(lines=lines, indent=""), lines=lines, indent=outer + unit
        )
    last = node.members[-1]
    earlier = node.members[:-1]
    previous_end = earlier[-1].node.end if earlier else node.inside[0]
    own_line = "\n" in text[previous_end : last.start] or (not earlier and text[node.start] != "{")
    quote = text[last.start] if text[last.start] in "\"'" else ""
    colon = text[last.key_end : last.node.start]
    colon = colon if colon in (":", ": ", " : ") else ": "
    gap = (
        text[earlier[-1].comma + 1 : last.start]
        if earlier and earlier[-1].comma is not None
        else colon[1:]
    )
    commas = any(member.comma is not None for member in node.members) or (
        not earlier and quote != ""
    )
    return _Style(
        lines=own_line or last.node.bare,
        indent=reader.indentation(last.start) if own_line else outer + unit,
        quote=quote,
        colon=colon,
        gap=gap if gap in ("", " ") else " ",
        comma="," if commas else "",
    )


def _indentations(reader: Reader, node: Node) -> Iterator[str]:
    """By how much each object in *node*, itself first, indents its members."""
    if node.members and "\n" in reader.text[node.inside[0] : node.members[0].start]:
        outer, inner = reader.indentation(node.start), reader.indentation(node.members[0].start)
        if inner.startswith(outer) and inner != outer:
            yield inner.removeprefix(outer)
    for member in node.members:
        yield from _indentations(reader, member.node)


def _section(reader: Reader) -> Member | None:
    section = (
        next((member for member in reader.root.members if member.key == "aio"), None)
        if reader.root
        else None
    )
    # null is DeepSpeed's defaults
    if section and not (section.node.value is None or isinstance(section.node.value, dict)):
        reader.fail(
            section.node.start,
            'DeepSpeed needs an object here: make it "aio": {}, or remove the key',
        )
    return section


def _section_values(reader: Reader) -> dict[str, Any]:
    section = _section(reader)
    return (section.node.value or {}) if section else {}


# Files


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _read_text(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give the path of a DeepSpeed config") from None
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"{path} is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}; give the path of a DeepSpeed config"
        )
    data = path.read_bytes()
    kept = commit.kept_of(path.resolve())
    if kept.is_file() and kept.read_bytes() != data:
        raise UsageError(
            f"an edit of {path} was cut short, and it may hold a part of it: its text from before is in {kept}; copy that back, "
            f"or remove {kept.name} if the file is right"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        valid = data[: error.start].decode("utf-8").removeprefix("\ufeff")
        line = re.split("\r\n|\r|\n", valid)
        place = f"line {len(line)}, column {len(line[-1]) + 1}"
        raise UsageError(
            f"{path}: {place}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None


def _replace_file(path: Path, data: bytes) -> None:
    """Have the file that *path* leads to hold *data*: all of it or, after a crash, none."""
    target = path.resolve()
    old = target.stat()
    if not is_writable(target):  # a rename needs no right to write the file
        raise PermissionError(
            errno.EACCES,
            "the config is read-only; make it writable (chmod u+w) to have its aio section set",
            str(path),
        )
    if old.st_nlink == 1 and not _has_attributes(target):
        try:
            commit.write_file(target, data, stat.S_IMODE(old.st_mode), (old.st_uid, old.st_gid))
            return
        except OSError as error:
            # something is mounted there; only root may give a file away
            if error.errno not in (errno.EBUSY, errno.EPERM):
                raise
    commit.overwrite_file(target, data)


def _has_attributes(target: Path) -> bool:
    """Whether the file has an ACL or other attributes that a new one in its place would lack."""
    try:
        # A new file gets the label of the security module by the same rules.
        return any(name != "security.selinux" for name in os.listxattr(target))
    except OSError:
        return False  # a filesystem without attributes
