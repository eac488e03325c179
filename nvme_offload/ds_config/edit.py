"""Sets the `aio` section of a DeepSpeed config file. Every other byte stays.

DeepSpeed 0.19.8 parses the file with hjson (`DeepSpeedConfig.__init__` in
deepspeed/runtime/config.py) and refuses duplicate keys. So a config may have comments, trailing
commas, unquoted keys and strings, or no outer braces: no JSON writer would preserve them. The text
is parsed into nodes with positions (hjson_reader.py), and an edit replaces or inserts text at these
positions only.
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

# DeepSpeed's key -> ours (deepspeed/runtime/swap_tensor/constants.py). DeepSpeed ignores
# `thread_count`, which its documentation and Lightning write.
_OUR_NAMES = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "intra_op_parallelism": "thread_count",
    "single_submit": "single_submit",
    "overlap_events": "overlap_events",
}
# A plain, 'single' or "double" quoted scalar. `accelerate config` writes the first.
_YAML_FILE = re.compile(
    r"""^[ \t]+deepspeed_config_file:[ \t]+(?:'([^'\n]+)'|"([^"\\\n]+)"|([^\s'"#{\[&*!|>%@][^\n]*?))[ \t]*(?:[ \t]#.*)?$""",
    re.MULTILINE,
)
_FLAGS = ("single_submit", "overlap_events")
# DeepSpeed's defaults (deepspeed/runtime/swap_tensor/constants.py).
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
    """The result of `apply`.

    Attributes
    ----------
    path : Path
        As given.
    changed : bool
        False when the file had these settings already and was not written.
    settings : dict
        The keys that were set, with their values.
    before : dict
        The old values of those that the section had.
    ignored : tuple of str
        Keys of the section that DeepSpeed does not read, such as `thread_count`. They are
        unchanged.
    """

    path: Path
    changed: bool
    settings: dict[str, int | bool]
    before: dict[str, Any]
    ignored: tuple[str, ...]


def aio_section(
    setting: Profile | Setting | AioConfig | Mapping[str, Any],
) -> dict[str, int | bool]:
    """Convert settings to DeepSpeed's keys.

    Parameters
    ----------
    setting : Profile, Setting, AioConfig or Mapping
        Of a profile the chosen setting. A mapping has any of DeepSpeed's keys already, and is
        checked; block_size in bytes.

    Returns
    -------
    dict
        The contents of an `aio` section.

    Raises
    ------
    UsageError
        A key that DeepSpeed does not read, a value that it would refuse, or no key at all.

    Notes
    -----
    Source: deepspeed/runtime/swap_tensor/aio_config.py.
    """
    if isinstance(setting, Profile):
        setting = setting.chosen
    if not isinstance(setting, Mapping):
        setting = {key: getattr(setting, name) for key, name in _OUR_NAMES.items()}
    for key, value in setting.items():
        if key not in _OUR_NAMES:
            called = "; DeepSpeed calls it intra_op_parallelism"
            hint = called if key in ("thread_count", "num_threads") else ""
            raise UsageError(
                f"{key!r} cannot be set in the aio section, only {', '.join(_OUR_NAMES)}{hint}"
            )
        flag, is_flag = key in _FLAGS, isinstance(value, bool)
        if flag and not is_flag:
            raise UsageError(f"aio.{key} must be true or false, not {value!r}")
        if not flag and (is_flag or not isinstance(value, int) or value < 1):
            raise UsageError(f"aio.{key} must be a whole number from 1, not {value!r}")
    if not setting:
        raise UsageError(
            f"there is nothing to set in the aio section; give at least one of {', '.join(_OUR_NAMES)}"
        )
    return {key: setting[key] for key in _OUR_NAMES if key in setting}


def zero_infinity(
    aio: Profile | Setting | AioConfig | Mapping[str, Any], nvme_path: str | Path
) -> str:
    """Write a minimal config for ZeRO-Infinity with parameters and optimizer states on a drive.

    Parameters
    ----------
    aio : Profile, Setting, AioConfig or Mapping
        As for `aio_section`.
    nvme_path : str or Path
        The directory, written as given: give an absolute path.

    Returns
    -------
    str
        JSON. Batch size, optimizer and learning rate (DeepSpeed's default) are for the user to
        edit.

    Raises
    ------
    UsageError
        As `aio_section`.

    Notes
    -----
    `max_in_cpu` (in elements) is 0: otherwise DeepSpeed keeps the first billion parameters in host
    memory. `pipeline_read` and `pipeline_write` are off: with them `zero_to_fp32` collates wrong
    weights. Lightning refuses `gradient_accumulation_steps`, so it is not set; Lightning's `test`
    and `predict` need `zero_allow_untested_optimizer`. Source:
    deepspeed/runtime/zero/offload_config.py.
    """
    offload = {"device": "nvme", "nvme_path": os.fspath(nvme_path), "pin_memory": True}
    buffers = {"buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**offload, **buffers},
            "offload_optimizer": {**offload, "buffer_count": 4},
        },
        "aio": aio_section(aio),
    }
    return json.dumps(config, indent=2) + "\n"


def apply(path: str | Path, settings: Profile | Setting | AioConfig | Mapping[str, Any]) -> Applied:
    """Set the `aio` section of a DeepSpeed config file.

    Parameters
    ----------
    path : str or Path
        The config, or a symlink to it.
    settings : Profile, Setting, AioConfig or Mapping
        As for `aio_section`.

    Returns
    -------
    Applied
        The changes.

    Raises
    ------
    UsageError
        *path* is not a regular file, or DeepSpeed would not read it; with file, line and column.
    OSError
        The file cannot be written.

    Notes
    -----
    After an error the file is unchanged. A file that has the settings already is not written.
    Otherwise the new text is written to a temporary file, synced and renamed, which keeps mode,
    owner and symlinks: a crash leaves the old file or the new one. The file is written in place
    where a new file would lose something (an ACL, extended attributes, a hard link, another user's
    ownership) or cannot be renamed (a bind mount); `.NAME.before` then has the old text until the
    new one is synced. Source: rename(2), fsync(2).
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
    """Read the `aio` section as DeepSpeed will.

    Parameters
    ----------
    path : str or Path
        The config.

    Returns
    -------
    dict
        Empty without a section.

    Raises
    ------
    UsageError
        DeepSpeed would not read the file; with file, line and column.
    OSError
        The file cannot be read.
    """
    path = Path(path)
    text = _read_text(path)
    with _naming(path):
        return _section_values(Reader(text))


def read(path: str | Path) -> dict[str, Any]:
    """Read the whole config as DeepSpeed will.

    Parameters
    ----------
    path : str or Path
        The config.

    Returns
    -------
    dict
        Its values.

    Raises
    ------
    UsageError, OSError
        As `read_aio`.
    """
    path = Path(path)
    text = _read_text(path)
    with _naming(path):
        return parse(text)


def locate(path: str | Path) -> Path:
    """Find the DeepSpeed config that a path leads to.

    Parameters
    ----------
    path : str or Path
        A DeepSpeed config, or a YAML file of `accelerate config`.

    Returns
    -------
    Path
        *path*, or the file that the YAML names.

    Raises
    ------
    UsageError
        The YAML names no config, or the config does not exist.

    Notes
    -----
    Source: accelerate/commands/config/config_args.py and utils/dataclasses.py
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
            f"{path} names no DeepSpeed config: an aio section needs a separate DeepSpeed config, so write one and name it there as deepspeed_config_file, "
            "below deepspeed_config"
        )
    name = Path(next(part for part in named.groups() if part is not None)).expanduser()
    for place in (name, path.parent / name):
        if place.exists():
            return place
    raise UsageError(
        f"{path} names the DeepSpeed config {name}, which does not exist; correct its deepspeed_config_file"
    )


def is_writable(path: str | Path) -> bool:
    """Whether `apply` may replace the file: a read-only file, or one in a read-only directory, is
    not meant to change.

    Parameters
    ----------
    path : str or Path
        An existing file.

    Returns
    -------
    bool
    """
    target = Path(path).resolve()
    if not target.stat().st_mode & 0o222:
        return False
    return os.access(target, os.W_OK) and os.access(target.parent, os.W_OK | os.X_OK)


def parse(text: str) -> dict[str, Any]:
    """Parse a config as DeepSpeed does, with the rules of hjson.

    Parameters
    ----------
    text : str
        The config.

    Returns
    -------
    dict
        Its values.

    Raises
    ------
    UsageError
        DeepSpeed would refuse it; with line and column.
    """
    root = Reader(text).root
    return root.value if root else {}


def edit(text: str, aio: Mapping[str, Any]) -> str:
    """Set keys in the `aio` section of a config.

    Parameters
    ----------
    text : str
        The config.
    aio : Mapping
        Values by DeepSpeed's keys.

    Returns
    -------
    str
        The new config; *text* itself where it has the values already.

    Raises
    ------
    UsageError
        DeepSpeed would refuse *text*, with line and column; or its `aio` is not an object.

    Notes
    -----
    A value is replaced unless it is written as JSON would: `"8"` and `8.0` become `8`, because
    plain-JSON readers such as Hugging Face's expect an integer. Missing keys, or a missing section,
    are appended in the style of the file.
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
    """How an object is written: one member per line behind *indent*, or on one line with *gap*
    after a comma.
    """

    lines: bool
    indent: str
    quote: str = '"'
    colon: str = ": "
    gap: str = " "
    comma: str = ","  # between lines hjson needs no comma

    def member(self, key: str, value: str) -> str:
        return f"{self.quote}{key}{self.quote}{self.colon}{value}"

    def join(self, members: list[str]) -> str:
        return (f"{self.comma}\n{self.indent}" if self.lines else f",{self.gap}").join(members)


def _edits(reader: Reader, wanted: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    """The replacements that set the section to *wanted*, which maps keys to the text of their
    values.
    """
    end = len(reader.text)
    if reader.root is None:
        style = _Style(lines=True, indent="  ")
        begin = "\n" if reader.text and not reader.text.endswith("\n") else ""
        member = style.member("aio", _new_section(style, "  ", "  ", wanted))
        yield end, end, f"{begin}{{\n  {member}\n}}\n"
        return
    unit = next(_indentations(reader, reader.root), "  ")
    style = _style_of(reader, reader.root, unit, None)
    section = _section(reader)
    if section is None:
        member = style.member("aio", _new_section(style, style.indent, unit, wanted))
        yield from _additions(reader, reader.root, style, [member])
        return
    node = section.node
    if node.value is None:
        new = _new_section(style, reader.indentation(section.start), unit, wanted)
        yield node.start, node.end, new
        return
    for each in node.members:
        if each.key in wanted:
            yield from _replacement(reader, each.node, wanted[each.key])
    style = _style_of(reader, node, unit, style)
    missing = [style.member(key, wanted[key]) for key in wanted if key not in node.value]
    if missing:
        yield from _additions(reader, node, style, missing)


def _replacement(reader: Reader, node: Node, new: str) -> Iterator[tuple[int, int, str]]:
    if reader.text[node.start : node.end] == new:
        return
    follower = len(reader.text) - len(reader.text[node.end :].lstrip(" \t"))
    # In hjson a quoted value needs no comma before the next key. A number does: without it the text
    # that follows would make it a string.
    yield node.start, node.end, new if STOP.match(reader.text, follower) else f"{new},"


def _additions(
    reader: Reader, node: Node, style: _Style, members: list[str]
) -> Iterator[tuple[int, int, str]]:
    """Append *members* to the object *node*."""
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
    # an unquoted string would include the comma
    elif not last.node.bare and (style.comma or not style.lines):
        yield at, at, ","
    if style.lines:  # a comment after the last member stays with it
        at = _end_of_comments(reader, at)
    yield at, at, (begin or style.gap) + style.join(members) + ("" if last.comma is None else ",")


def _end_of_comments(reader: Reader, at: int) -> int:
    while True:
        following = at
        while reader.text[following : following + 1] in (" ", "\t"):
            following += 1
        after = reader.after_comment(following)
        if after is None:
            return at
        at = after


def _new_section(style: _Style, outer: str, unit: str, wanted: Mapping[str, str]) -> str:
    """The text of an `aio` object with its closing brace behind *outer*."""
    inner = dataclasses.replace(style, indent=outer + unit)
    members = inner.join([inner.member(key, value) for key, value in wanted.items()])
    return f"{{\n{inner.indent}{members}\n{outer}}}" if style.lines else f"{{{members}}}"


def _style_of(reader: Reader, node: Node, unit: str, parent: _Style | None) -> _Style:
    """The style of the object *node*, from its last member; an empty object inherits from *parent*."""
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
    gap = colon[1:]
    if earlier and earlier[-1].comma is not None:
        gap = text[earlier[-1].comma + 1 : last.start]
    commas = any(member.comma is not None for member in node.members)
    commas = commas or (not earlier and quote != "")
    return _Style(
        lines=own_line or last.node.bare,
        indent=reader.indentation(last.start) if own_line else outer + unit,
        quote=quote,
        colon=colon,
        gap=gap if gap in ("", " ") else " ",
        comma="," if commas else "",
    )


def _indentations(reader: Reader, node: Node) -> Iterator[str]:
    """The indentation of the members of each object in *node*, itself first."""
    if node.members and "\n" in reader.text[node.inside[0] : node.members[0].start]:
        outer, inner = reader.indentation(node.start), reader.indentation(node.members[0].start)
        if inner.startswith(outer) and inner != outer:
            yield inner.removeprefix(outer)
    for member in node.members:
        yield from _indentations(reader, member.node)


def _section(reader: Reader) -> Member | None:
    members = reader.root.members if reader.root else []
    section = next((member for member in members if member.key == "aio"), None)
    # null means DeepSpeed's defaults
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
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise UsageError(f"{path} is {what}; give the path of a DeepSpeed config")
    data = path.read_bytes()
    kept = commit.kept_of(path.resolve())
    if kept.is_file() and kept.read_bytes() != data:
        raise UsageError(
            f"an edit of {path} was interrupted, and the file may be incomplete: the old text is in {kept}; copy that back, "
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
    """Replace the contents of the file that *path* leads to, atomically."""
    target = path.resolve()
    old = target.stat()
    if not is_writable(target):  # a rename does not need write permission on the file
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
            # EBUSY: a mount point. EPERM: only root may give a file to another owner.
            if error.errno not in (errno.EBUSY, errno.EPERM):
                raise
    commit.overwrite_file(target, data)


def _has_attributes(target: Path) -> bool:
    """Whether the file has an ACL or extended attributes that a new file would lack."""
    try:
        # SELinux labels a new file by the same rules.
        return any(name != "security.selinux" for name in os.listxattr(target))
    except OSError:
        return False  # a filesystem without extended attributes
