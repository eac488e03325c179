"""Sets the `aio` section of a DeepSpeed config file. Every other byte stays.

DeepSpeed parses the file with hjson and refuses duplicate keys. This module reads the part of hjson
that people write: JSON with comments and trailing commas, which it blanks out, so that `json` finds
the values and their positions. Source: `DeepSpeedConfig.__init__` in deepspeed/runtime/config.py.
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
from typing import Any, NoReturn

from ..errors import UsageError
from ..files import commit
from ..hardware.config import AioConfig
from ..hardware.profile import Profile, Setting

# DeepSpeed's key -> ours (deepspeed/runtime/swap_tensor/constants.py). DeepSpeed ignores
# `thread_count`, which its documentation and Lightning write.
_OUR_NAMES = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "intra_op_parallelism": "thread_count",
    "single_submit": "single_submit",
    "overlap_events": "overlap_events",
}
_FLAGS = ("single_submit", "overlap_events")
_READ_BY_DEEPSPEED = (*_OUR_NAMES, "use_gds")
# A plain, 'single' or "double" quoted scalar. `accelerate config` writes the first.
_YAML_FILE = re.compile(
    r"""^[ \t]+deepspeed_config_file:[ \t]+(?:'([^'\n]+)'|"([^"\\\n]+)"|([^\s'"#{\[&*!|>%@].*?))[ \t]*(?:[ \t]#.*)?\r?$""",
    re.MULTILINE,
)
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|#[^\r\n]*|//[^\r\n]*|/\*(?:.|\n)*?\*/")
_TRAILING_COMMA = re.compile(rf"{_STRING}|[\[{{]\s*,|,(?=\s*[}}\]])")
_BLANKS = re.compile(r"\s*")


@dataclasses.dataclass(frozen=True)
class Applied:
    """The result of `apply`.

    Attributes
    ----------
    changed : bool
        False when the file had these settings already and was not written.
    settings, before : dict
        The keys that were set, with their values, and with the old values of those that were there.
    ignored : tuple of str
        Unchanged keys that DeepSpeed does not read, such as `thread_count`.
    """

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

    Raises
    ------
    UsageError
        A key that DeepSpeed does not read, a value that it would refuse, or no key at all. Source:
        deepspeed/runtime/swap_tensor/aio_config.py.
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
    """Write a minimal config for ZeRO-Infinity with parameters and optimizer states on a drive, in
    the directory *nvme_path*, which is written as given: give an absolute path. Batch size,
    optimizer and learning rate are for the user to edit. *aio*, and errors: as of `aio_section`.

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

    Raises
    ------
    UsageError
        *path* is not a regular file, or not JSON with comments and trailing commas.
    OSError
        The file cannot be written.

    Notes
    -----
    After an error the file is unchanged. The new text is written to a temporary file, synced and
    renamed, which keeps mode, owner and symlinks: a crash leaves the old file or the new one. The file
    is written in place where a new file would lose something (an ACL, extended attributes, a hard link,
    another user's ownership) or cannot be renamed (a bind mount); `.NAME.before` then has the old text
    until the new one is synced. Source: rename(2), fsync(2).
    """
    path = Path(path)
    wanted = aio_section(settings)
    text = _read_text(path)
    commit.kept_of(path.resolve()).unlink(missing_ok=True)
    with _naming(path):
        edited = edit(text, wanted)
        before = _section_of(parse(text))
    if edited != text:
        _replace_file(path, edited.encode("utf-8"))
    return Applied(
        changed=edited != text,
        settings=wanted,
        before={key: before[key] for key in wanted if key in before},
        ignored=unread(before),
    )


def unread(aio: Mapping[str, Any]) -> tuple[str, ...]:
    """Find the keys of an `aio` section that DeepSpeed does not read.

    Parameters
    ----------
    aio : Mapping
        The section.

    Returns
    -------
    tuple of str
        The keys, in the section's order.
    """
    return tuple(key for key in aio if key not in _READ_BY_DEEPSPEED)


def read_aio(path: str | Path) -> dict[str, Any]:
    """Read the `aio` section of the config *path*; empty without one. Raises: as `read`."""
    return _section_of(read(path))


def read(path: str | Path) -> dict[str, Any]:
    """Read the config *path*. Raises: UsageError if it is not JSON with comments and trailing
    commas; OSError.
    """
    path = Path(path)
    text = _read_text(path)
    with _naming(path):
        return parse(text)


def locate(path: str | Path) -> Path:
    """Find the DeepSpeed config that *path* leads to: it is one, or a YAML file of `accelerate
    config` that names one, relative to the working directory. Raises: UsageError. Source:
    accelerate/utils/dataclasses.py (`deepspeed_config_file`).
    """
    path = Path(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        return path
    named = _YAML_FILE.search(_read_text(path))
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
    """Whether `apply` may replace the existing file *path*: it and its directory are not read-only."""
    target = Path(path).resolve()
    if not target.stat().st_mode & 0o222:
        return False
    return os.access(target, os.W_OK) and os.access(target.parent, os.W_OK | os.X_OK)


def parse(text: str) -> dict[str, Any]:
    """Parse *text*, JSON that may have comments (`//`, `#`, `/* */`) and trailing commas. Raises:
    UsageError, also if a key is there twice, which DeepSpeed refuses.
    """
    try:
        config = json.loads(
            _json(text),
            object_pairs_hook=_without_duplicates,
            parse_float=_number,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise UsageError(
            f"line {error.lineno}, column {error.colno}: {error.msg}; a config is JSON, in which comments and trailing commas may be"
        ) from None
    except RecursionError:
        raise UsageError("brackets are nested too deeply to be read; remove some levels") from None
    if not isinstance(config, dict):
        raise UsageError("DeepSpeed needs an object, { ... }")
    _section_of(config)
    return config


def edit(text: str, aio: Mapping[str, Any]) -> str:
    """Set keys in the `aio` section of the config *text* to the values *aio*, by DeepSpeed's keys,
    and return the new text. Raises: as `parse` and `aio_section`.

    A value is replaced unless it is written as JSON would: `"8"` and `8.0` become `8`, because
    readers such as Hugging Face's expect an integer. Missing keys, or a missing section, are
    appended, with the indentation of the file.
    """
    aio = aio_section(aio)
    config = parse(text)
    root = _Object(text, _skip(_json(text), 0))
    if not isinstance(config.get("aio"), dict):
        lines = root.lines or not root.values
        new = json.dumps(aio, indent=root.unit if lines else None)
        new = new.replace("\n", "\n" + (root.indentation if lines else ""))
        edits = root.set({"aio": new}, lines)
    else:
        section = _Object(text, root.values["aio"][0], root.unit)
        lines = section.lines if section.values else root.lines
        edits = section.set({key: json.dumps(value) for key, value in aio.items()}, lines)
    newline = "\r\n" if "\r\n" in text else "\n"
    pieces, done = [], 0
    for begin, end, new in sorted(edits, key=lambda edit: edit[0]):
        pieces += [text[done:begin], new.replace("\n", newline)]
        done = end
    return "".join([*pieces, text[done:]])


class _Object:
    """The object that starts at *begin* of *text*. *values*: start and end of the value of each
    key. *lines*: whether it has several. *unit*: the indentation of a level; *outer*,
    *indentation*: of the object's first line, and of its members.
    """

    def __init__(self, text: str, begin: int, unit: str | None = None) -> None:
        self._whole, plain, decoder = text, _json(text), json.JSONDecoder()
        self.values: dict[str, tuple[int, int]] = {}
        self._begin, at, first = begin, _skip(plain, begin + 1), None
        while plain[at] != "}":
            first = first or at
            key, at = decoder.raw_decode(plain, at)
            value = _skip(plain, _skip(plain, at) + 1)
            _, at = decoder.raw_decode(plain, value)
            self.values[key] = value, at
            at = _skip(plain, at)
            at = _skip(plain, at + 1) if plain[at] == "," else at
        self._close = at
        self.lines = bool(re.search("[\r\n]", text[begin:at]))
        self.outer = _indentation(text, begin)
        self.unit = "  " if unit is None else unit
        self.indentation = self.outer + self.unit
        if first is not None and "\n" in text[begin:first]:
            self.indentation = _indentation(text, first)
            self.unit = self.indentation.removeprefix(self.outer)

    def set(self, wanted: Mapping[str, str], lines: bool) -> Iterator[tuple[int, int, str]]:
        """The edits (start, end, new) that set *wanted* keys to these texts, with added keys on
        separate *lines*.
        """
        for key, new in wanted.items():
            if key in self.values:
                yield (*self.values[key], new)
        added = [f'"{key}": {new}' for key, new in wanted.items() if key not in self.values]
        if not added:
            return
        if self.values:
            last = max(end for _, end in self.values.values())
            behind = _COMMENT.sub(_blank, self._whole[last : self._close])
            if "," not in behind:
                yield last, last, ","
        before = self._whole[self._begin + 1 : self._close]
        at = self._begin + 1 + len(before.rstrip())
        start = f"\n{self.indentation}" if lines else " " if self.values else ""
        text = start + (f",\n{self.indentation}" if lines else ", ").join(added)
        if lines and "\n" not in self._whole[at : self._close]:
            text += f"\n{self.outer}"
        yield at, at, text


def _json(text: str) -> str:
    """*text* with blanks for byte order mark, comments and trailing commas."""
    text = re.sub("^\ufeff", " ", text)
    return _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))


def _blank(found: re.Match[str]) -> str:
    kept = found[0].startswith(('"', "[", "{"))
    return found[0] if kept else re.sub(r"[^\r\n]", " ", found[0])


def _skip(text: str, at: int) -> int:
    """The first position from *at* on without whitespace."""
    found = _BLANKS.match(text, at)
    return found.end() if found else at


def _indentation(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UsageError(
            f"key {json.dumps(twice)} is there twice; DeepSpeed refuses that: remove one of the two"
        )
    return found


def _number(text: str) -> int | float:
    """As hjson reads a number with a fraction or an exponent."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 1e10 else value


def _refuse_constant(text: str) -> NoReturn:
    raise UsageError(f"{text} is not JSON, and a string for DeepSpeed: put it in quotes")


def _section_of(config: Mapping[str, Any]) -> dict[str, Any]:
    section = config.get("aio")
    if section is None:  # null means DeepSpeed's defaults
        return {}
    if not isinstance(section, dict):
        raise UsageError('DeepSpeed needs an object as "aio": make it {}, or remove the key')
    return section


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
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}: line {line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
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
