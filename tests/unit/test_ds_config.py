"""Edits of a DeepSpeed config: changes, text that must stay, and refusals."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nvme_offload.ds_config.edit import (
    aio_section,
    apply,
    edit,
    locate,
    read_aio,
    zero_infinity,
)
from nvme_offload.errors import UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import Setting

SETTING = Setting(block_size=8 << 20, queue_depth=16, thread_count=4)
AIO = {
    "block_size": 8388608,
    "queue_depth": 16,
    "intra_op_parallelism": 4,
    "single_submit": False,
    "overlap_events": True,
}
ONE_LINE = '{"block_size": 8388608, "queue_depth": 16, "intra_op_parallelism": 4, "single_submit": false, "overlap_events": true}'

HUGGING_FACE = """\
{
    "bf16": {
        "enabled": "auto"
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto"}
    },
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 2e8},
        "sub_group_size": 1e9
    },
    "train_micro_batch_size_per_gpu": "auto"
}
"""

TUNED_BY_HAND = """\
# the team's config; ask before you change it
{
  "zero_optimization": {
    "stage": 3,   // needed for nvme
    "offload_param": { "device": "nvme", "nvme_path": "/local_nvme" }
  },
  /* was measured in 2021 */
  "aio" : {
    "queue_depth" : 8, # "queue_depth": 99
    "block_size": 1e6  /* bytes */ ,
    "thread_count": 8
  },
  "notes": "# \\"aio\\": { not this one }",
  "nested": { "aio": { "block_size": 1 } },
  "train_micro_batch_size_per_gpu": 1,
}
"""


# Additions and their style


def test_a_missing_section_is_added_in_the_indentation_of_the_file() -> None:
    added = """\
    "train_micro_batch_size_per_gpu": "auto",
    "aio": {
        "block_size": 8388608,
        "queue_depth": 16,
        "intra_op_parallelism": 4,
        "single_submit": false,
        "overlap_events": true
    }
}
"""
    assert edit(HUGGING_FACE, AIO) == HUGGING_FACE.replace(
        '    "train_micro_batch_size_per_gpu": "auto"\n}\n', added
    )


def test_an_existing_section_keeps_its_comments_and_its_other_keys() -> None:
    expected = TUNED_BY_HAND.replace('"queue_depth" : 8,', '"queue_depth" : 16,').replace(
        "1e6", "8388608"
    )
    expected = expected.replace(
        '    "thread_count": 8\n',
        '    "thread_count": 8,\n    "intra_op_parallelism": 4,\n    "single_submit": false,\n    "overlap_events": true\n',
    )
    assert edit(TUNED_BY_HAND, AIO) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param('{"a":1}', '{"a":1, "aio": ' + ONE_LINE + "}", id="minified"),
        pytest.param(
            '{"a": 1 /* c */}', '{"a": 1, /* c */ "aio": ' + ONE_LINE + "}", id="one line, comment"
        ),
        pytest.param(
            '{"aio": null, "b": 1}',
            '{"aio": ' + ONE_LINE + ', "b": 1}',
            id="null, which DeepSpeed takes for its defaults",
        ),
        pytest.param('{"\\u0061io": {}}', '{"\\u0061io": ' + ONE_LINE + "}", id="escaped key"),
    ],
)
def test_one_line_stays_one_line(before: str, after: str) -> None:
    assert edit(before, AIO) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("{}", '{\n  "aio": {\n    "queue_depth": 2\n  }\n}', id="empty object"),
        pytest.param(
            '{\n  "a": 1 // one\n  // end\n}\n',
            '{\n  "a": 1, // one\n  // end\n  "aio": {\n    "queue_depth": 2\n  }\n}\n',
            id="comment behind the last member",
        ),
        pytest.param(
            '{\n\t"a": [\n\t\t1\n\t]\n}',
            '{\n\t"a": [\n\t\t1\n\t],\n\t"aio": {\n\t\t"queue_depth": 2\n\t}\n}',
            id="tabs",
        ),
        pytest.param(
            '{\n"a": 1\n}', '{\n"a": 1,\n"aio": {\n"queue_depth": 2\n}\n}', id="no indentation"
        ),
        pytest.param(
            '{\n  "aio": { // none\n  }\n}',
            '{\n  "aio": { // none\n    "queue_depth": 2\n  }\n}',
            id="empty section with a comment",
        ),
    ],
)
def test_lines_stay_lines(before: str, after: str) -> None:
    assert edit(before, {"queue_depth": 2}) == after


def test_mixed_line_ends_stay_mixed() -> None:
    before = '{\r\n  "a": 1,\n\r\n  "aio": {"queue_depth": 1}\n}\r\n'
    assert edit(before, {"queue_depth": 2}) == before.replace(
        '"queue_depth": 1', '"queue_depth": 2'
    )


# Which values are replaced


# Refusals

REFUSED = [
    pytest.param(
        '{\n  "a": 1,\n  "b": {"c": 1, "c": 2}\n}',
        'key "c" is there twice; DeepSpeed refuses that',
        id="duplicate key",
    ),
    pytest.param('{"aio": {},\r\n "\\u0061io": {}}', 'key "aio" is there twice', id="two sections"),
    pytest.param("[1]", "DeepSpeed needs an object", id="list"),
    pytest.param('"text"', "DeepSpeed needs an object", id="string"),
    pytest.param('\ufeff{\n  "a": {\n}', "line 3, column 2: ", id="unclosed object"),
    pytest.param('{"a": "x\n"}', "line 1, column 9: ", id="unclosed string"),
    pytest.param("{} /* x", "line 1, column 4: ", id="unclosed comment"),
    pytest.param('{"a": 1}\n}', "line 2, column 1: ", id="more text"),
    pytest.param('{"a": /* none */ }', "line 1, column 18: ", id="no value"),
    pytest.param('{"a": 1,, "b": 2}', "line 1, column 9: ", id="two commas"),
    pytest.param('{"a": "\\x"}', "line 1, column 8: ", id="unknown escape"),
    pytest.param('{"a": ' * 100_000, "brackets are nested too deeply", id="nested too deeply"),
    pytest.param(
        '{\n  "aio": "auto"\n}', 'DeepSpeed needs an object as "aio"', id="section is no object"
    ),
]
HJSON = [
    pytest.param("", "line 1, column 1: ", id="empty"),
    pytest.param("{a: 1}", "line 1, column 2: ", id="no quotes"),
    pytest.param("{'a': 1}", "line 1, column 2: ", id="single quotes"),
    pytest.param('{"a": 1\n "b": 2}', "line 2, column 2: ", id="no comma"),
    pytest.param('"a": 1', "line 1, column 4: ", id="no braces"),
]


@pytest.mark.parametrize(("text", "message"), [*REFUSED, *HJSON])
def test_a_config_that_is_not_json_with_comments_is_refused_and_left_alone(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(text.encode())
    with pytest.raises(UsageError) as caught:
        apply(path, SETTING)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_utf_8_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes('{\r\n  "é": "'.encode() + b'\xe9"}')
    with pytest.raises(
        UsageError,
        match=r"ds\.json: line 2: byte 0xe9 is not UTF-8; save the file as UTF-8",
    ):
        apply(path, SETTING)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"thread_count": 2},
            "'thread_count' cannot be set.*DeepSpeed calls it intra_op_parallelism",
        ),
        ({"use_gds": True}, "'use_gds' cannot be set"),
        ({"block_size": True}, "aio.block_size must be a whole number from 1, not True"),
        ({"queue_depth": 0}, "aio.queue_depth must be a whole number from 1, not 0"),
        ({"queue_depth": 8.0}, "aio.queue_depth must be a whole number from 1, not 8.0"),
        ({"single_submit": 0}, "aio.single_submit must be true or false, not 0"),
        ({"overlap_events": "true"}, "aio.overlap_events must be true or false, not 'true'"),
        ({}, "there is nothing to set"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        edit("{}", settings)


def test_settings_come_from_a_setting_an_engine_config_or_deepspeeds_own_keys() -> None:
    assert aio_section(SETTING) == AIO
    assert (
        aio_section(AioConfig(block_size=8 << 20, queue_depth=16, thread_count=4, direct="auto"))
        == AIO
    )
    assert list(aio_section({"queue_depth": 2, "block_size": 4096}).items()) == [
        ("block_size", 4096),
        ("queue_depth", 2),
    ]


# Files


def test_apply_says_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(TUNED_BY_HAND)
    applied = apply(str(path), SETTING)
    assert (applied.changed, applied.settings) == (True, AIO)
    assert applied.before == {"queue_depth": 8, "block_size": 1000000}
    assert applied.ignored == ("thread_count",)
    assert path.read_text() == edit(TUNED_BY_HAND, AIO)
    assert read_aio(path) == {**AIO, "thread_count": 8}


def test_bytes_outside_the_values_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    before = b'\xef\xbb\xbf{\r\n\t"name": "caf\xc3\xa9 \xf0\x9f\x98\x80",\r\n\t"aio": {"queue_depth": 8} // \xe2\x82\xac\r\n}'
    path.write_bytes(before)
    apply(path, {"queue_depth": 16})
    assert path.read_bytes() == before.replace(b"8}", b"16}")


def test_a_second_application_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(HUGGING_FACE)
    apply(path, SETTING)
    path.chmod(0o400)
    before = path.stat()
    applied = apply(path, SETTING)
    assert (applied.changed, applied.before) == (False, AIO)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_mode_and_owner_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{}")
    if os.geteuid() == 0:
        os.chown(path, 12345, 54321)
    path.chmod(0o664)
    before = path.stat()
    apply(path, SETTING)
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert after.st_ino != before.st_ino


# user 1234: rw
NOBODY = 0xFFFFFFFF
ENTRIES = (1, 6, NOBODY), (2, 6, 1234), (4, 0, NOBODY), (0x10, 6, NOBODY), (0x20, 0, NOBODY)
ACL = struct.pack("<I" + "HHI" * 5, 2, *(value for entry in ENTRIES for value in entry))


@pytest.mark.parametrize(
    ("name", "value"), [("user.note", b"mine"), ("system.posix_acl_access", ACL)]
)
def test_attributes_and_acls_are_kept(tmp_path: Path, name: str, value: bytes) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{}")
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"the filesystem of {tmp_path} takes no {name}: {error}")
    before = path.stat()
    apply(path, SETTING)
    assert os.getxattr(path, name) == value
    assert path.stat().st_mode == before.st_mode
    assert json.loads(path.read_text()) == {"aio": AIO}
    assert list(tmp_path.iterdir()) == [path]


def test_a_hard_link_stays_one(tmp_path: Path) -> None:
    path, other = tmp_path / "ds.json", tmp_path / "other.json"
    path.write_text(HUGGING_FACE)
    other.hardlink_to(path)
    apply(path, SETTING)
    assert other.read_text() == path.read_text() == edit(HUGGING_FACE, AIO)


def test_a_bind_mount_is_written_to(tmp_path: Path, mount_namespace: None) -> None:
    host, path = tmp_path / "host.json", tmp_path / "ds.json"
    host.write_text(HUGGING_FACE)
    path.touch()
    subprocess.run(["mount", "--bind", str(host), str(path)], check=True)
    try:
        apply(path, SETTING)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
    assert host.read_text() == edit(HUGGING_FACE, AIO)
    assert sorted(tmp_path.iterdir()) == sorted([host, path])


def test_an_edit_in_place_that_was_cut_short_is_reported_and_not_built_upon(tmp_path: Path) -> None:
    path, kept = tmp_path / "ds.json", tmp_path / ".ds.json.before"
    path.write_text(HUGGING_FACE[:40])
    kept.write_text(HUGGING_FACE)
    for use in (lambda: read_aio(path), lambda: apply(path, SETTING)):
        with pytest.raises(
            UsageError,
            match=r"interrupted.*the old text is in .*ds.json.before; copy that back",
        ):
            use()
    path.write_text(HUGGING_FACE)
    apply(path, SETTING)
    assert path.read_text() == edit(HUGGING_FACE, AIO)
    assert list(tmp_path.iterdir()) == [path]


def test_a_symlink_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    real = tmp_path / "real" / "ds.json"
    real.parent.mkdir()
    real.write_text("{}")
    link = tmp_path / "ds.json"
    link.symlink_to("real/ds.json")
    apply(link, SETTING)
    assert link.readlink() == Path("real/ds.json")
    assert json.loads(real.read_text()) == {"aio": AIO}
    assert list(real.parent.iterdir()) == [real]


@pytest.mark.parametrize("step", ["os.write", "os.fchmod", "os.fsync", "pathlib.Path.replace"])
def test_a_failure_on_the_way_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(HUGGING_FACE)

    def fail(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, fail)
    with pytest.raises(OSError, match="No space left on device"):
        apply(path, SETTING)
    assert path.read_text() == HUGGING_FACE
    assert list(tmp_path.iterdir()) == [path]


def test_a_read_only_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{}")
    path.chmod(0o444)
    with pytest.raises(PermissionError, match="the config is read-only; make it writable"):
        apply(path, SETTING)
    assert path.read_text() == "{}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_file_or_directory_without_permission_is_an_oserror(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(PermissionError):
        apply(path, SETTING)
    path.chmod(0o644)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(PermissionError):
            apply(path, SETTING)
        assert path.read_text() == "{}"
    finally:
        tmp_path.chmod(0o755)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none does not exist"):
        apply(tmp_path / "none", SETTING)
    with pytest.raises(UsageError, match="is a directory"):
        apply(tmp_path, SETTING)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is not a regular file"):
        read_aio(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(UsageError, match="dangling does not exist"):
        apply(tmp_path / "dangling", SETTING)


@pytest.mark.parametrize("text", ["{}", '{"aio": null}', "# nothing\n{}"])
def test_a_config_without_a_section_reads_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert read_aio(path) == {}


def test_a_section_that_is_no_object_does_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"aio": [1]}')
    with pytest.raises(UsageError, match=r"ds\.json: DeepSpeed needs an object as"):
        read_aio(path)


# The complete config, and DeepSpeed's own parser


def test_the_ready_config_puts_everything_on_the_drive() -> None:
    config = json.loads(zero_infinity(SETTING, Path("/local_nvme")))
    assert config["aio"] == AIO
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    for part in (zero["offload_param"], zero["offload_optimizer"]):
        assert (part["device"], part["nvme_path"], part["pin_memory"]) == (
            "nvme",
            "/local_nvme",
            True,
        )
    assert zero["offload_param"]["max_in_cpu"] == 0
    assert edit(zero_infinity(SETTING, "/x"), AIO) == zero_infinity(SETTING, "/x")


DEEPSPEEDS = "ignore:.*unclosed file|Exception ignored in"  # warnings of files that it leaves open


@pytest.fixture
def as_deepspeed_reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's configuration of a file, of which only what the text says is judged, and not that
    a file of one line trains nothing.
    """
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    for check in ("_configure_train_batch_size", "_do_sanity_check"):
        monkeypatch.setattr(config.DeepSpeedConfig, check, lambda self: None)
    return lambda path: config.DeepSpeedConfig(str(path))


@pytest.mark.filterwarnings(DEEPSPEEDS)
@pytest.mark.deepspeed
def test_deepspeed_reads_what_was_written(tmp_path: Path, as_deepspeed_reads: Any) -> None:
    ready, by_hand = tmp_path / "ready.json", tmp_path / "by_hand.hjson"
    ready.write_text(zero_infinity(SETTING, "/local_nvme"))
    by_hand.write_bytes(TUNED_BY_HAND.replace("\n", "\r\n").encode())
    apply(by_hand, SETTING)
    first, second = map(as_deepspeed_reads, (ready, by_hand))
    for config in (first, second):
        assert config.aio_config == {**AIO, "use_gds": False}
        assert config.zero_config.stage == 3
    assert (first.optimizer_name, first.bfloat16_config.enabled) == ("adamw", True)
    for part in (first.zero_config.offload_param, first.zero_config.offload_optimizer):
        assert str(part.nvme_path) == "/local_nvme"
    assert first.zero_config.offload_param.max_in_cpu == 0


@pytest.mark.filterwarnings(DEEPSPEEDS)
@pytest.mark.deepspeed
def test_deepspeed_refuses_what_is_refused_here_and_takes_the_rest(
    tmp_path: Path, as_deepspeed_reads: Any
) -> None:
    path = tmp_path / "ds.json"
    for case in REFUSED:
        path.write_bytes(str(case.values[0]).encode())
        with pytest.raises(Exception):  # noqa: B017, PT011 - of any class
            as_deepspeed_reads(path)
    for text in (
        "{}",
        "# nothing\r\n{}",
        '{"aio": null}',
        '{"aio": {"queue_depth": 8, /* c */ "block_size": 1e6,},}',
        "\ufeff{}",
    ):
        path.write_bytes(text.encode())
        defaults = {
            "block_size": 1048576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
        assert as_deepspeed_reads(path).aio_config == {**defaults, **read_aio(path)}


# Accelerate's YAML


ACCELERATE = "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  deepspeed_config_file: {}\n  zero3_init_flag: true\ndistributed_type: DEEPSPEED\n"


@pytest.mark.parametrize(
    "written", ["ds.json", "'ds.json'", '"ds.json"', "ds.json  # tuned", "{tmp}/ds.json"]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_accelerates_yaml_leads_to_the_config_that_it_names(
    tmp_path: Path, written: str, newline: str
) -> None:
    (tmp_path / "ds.json").write_text("{}")
    yaml = tmp_path / "accelerate.yaml"
    yaml.write_bytes(
        ACCELERATE.format(written.format(tmp=tmp_path)).replace("\n", newline).encode()
    )
    assert locate(yaml) == tmp_path / "ds.json"
    assert locate(tmp_path / "ds.json") == tmp_path / "ds.json"


def test_a_name_is_looked_for_in_the_working_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("work", "yaml"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "ds.json").write_text("{}")
    (tmp_path / "yaml/accelerate.yml").write_text(ACCELERATE.format("ds.json"))
    monkeypatch.chdir(tmp_path / "work")
    assert locate(tmp_path / "yaml/accelerate.yml").resolve() == tmp_path / "work/ds.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ACCELERATE.format("absent.json"),
            "names the DeepSpeed config absent.json, which does not exist",
        ),
        ("deepspeed_config:\n  zero_stage: 3\n", "names no DeepSpeed config"),
        ("", "names no DeepSpeed config"),
    ],
)
def test_a_yaml_that_leads_nowhere_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "accelerate.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        locate(tmp_path / "accelerate.yaml")
    with pytest.raises(UsageError, match="does not exist"):
        locate(tmp_path / "none.yaml")
