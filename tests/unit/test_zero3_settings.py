"""`Settings` and `aio_config`: what a ds_config says of offload to drives."""

from __future__ import annotations

import copy
import json
import logging
import re
import tempfile

import pytest
import torch

from nvme_offload import AioConfig, NVMeOptimizer, UnsupportedError, UsageError, save_on_nvme
from nvme_offload.zero3 import settings
from nvme_offload.zero3.settings import (
    Settings,
    aio_config,
    check,
    nvme_paths,
    tier_of,
    zero_stage,
)
from nvme_offload.zero3.stages import offloads


def of(**section: object) -> Settings:
    return Settings.of({"nvme_offload": section})


def test_everything_may_be_left_out():
    assert Settings.of({}) == of() == Settings("native", "auto", "libaio", (), (), False)


def test_every_key_is_read():
    assert of(state_format="compact").state_format == "compact"
    section = {
        "swappers": "deepspeed",
        "host_memory": 4096,
        "backend": "posix",
        "paths": ["/a", "/b"],
        "weights": [1, 2.5],
        "checksum": True,
        "state_format": "exact",
        "missing_gradients": "last",
    }
    assert of(**section) == Settings(
        "deepspeed", 4096, "posix", ("/a", "/b"), (1.0, 2.5), True, "exact", "last"
    )
    assert of(**json.loads(json.dumps(section))) == of(**section)


@pytest.mark.parametrize(
    ("key", "value"),
    [("state_format", "split"), ("missing_gradients", "zero"), ("overlap_step", True)],
)
def test_what_deepspeeds_swappers_cannot_do_is_refused(key, value):
    with pytest.raises(
        UsageError,
        match=f'"{key}" in "nvme_offload" needs this package\'s swappers: leave "swappers" out',
    ):
        of(swappers="deepspeed", **{key: value})


def test_equal_settings_are_one_key_of_a_dict():
    assert len({of(paths=["/a"], host_memory="1KiB"), of(paths=("/a",), host_memory=1024)}) == 1


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 << 30),
        ("1.5 KiB", 1536),
        ("4096", 4096),
        (1, 1),
        (1 << 40, 1 << 40),
        (8e9, 8 * 10**9),
    ],
)
def test_host_memory_is_bytes_or_a_size(written, nbytes):
    assert of(host_memory=written).host_memory == nbytes


@pytest.mark.parametrize(
    "wrong", [0, -1, 1.5, True, None, "", "much", "-8GB", "0GB", "0.5", [], {}]
)
def test_another_host_memory_is_refused(wrong):
    with pytest.raises(
        UsageError,
        match=r'"host_memory" in "nvme_offload" must be "auto", bytes, or a size such as "8GB", not ',
    ):
        of(host_memory=wrong)


@pytest.mark.parametrize("key", ["host_memroy", "nvme_path", "device", "thread_count", ""])
def test_an_unknown_key_is_refused_with_those_that_are_known(key):
    with pytest.raises(
        UsageError,
        match=r"backend, checksum, host_memory, missing_gradients, overlap_step, paths, state_format, step_in_backward, swappers, update_device, weights$",
    ) as refusal:
        of(**{key: 1})
    assert repr(key) in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "wrong", "possible"),
    [
        ("swappers", "ours", '"native", "deepspeed"'),
        ("state_format", "lossless", '"exact", "split", "compact", "compact24"'),
        ("state_format", None, '"exact", "split", "compact", "compact24"'),
        ("missing_gradients", "none", '"zero", "last"'),
        ("swappers", None, '"native", "deepspeed"'),
        ("swappers", [], '"native", "deepspeed"'),
        ("backend", "aio", '"libaio", "io_uring", "posix"'),
        ("backend", True, '"libaio", "io_uring", "posix"'),
        ("checksum", "true", "true, false"),
        ("checksum", 1, "true, false"),
        ("checksum", None, "true, false"),
        ("overlap_step", "yes", "true, false"),
    ],
)
def test_another_value_is_refused_with_those_that_are_possible(key, wrong, possible):
    with pytest.raises(UsageError) as refusal:
        of(**{key: wrong})
    assert (
        str(refusal.value) == f'"{key}" in "nvme_offload" must be one of {possible}, not {wrong!r}'
    )


@pytest.mark.parametrize("wrong", ["/local_nvme", [], [1], None, {"/a": 1}, ["/a", None]])
def test_paths_are_a_list_of_directories(wrong):
    with pytest.raises(UsageError, match='"paths" in "nvme_offload" must be a list of directories'):
        of(paths=wrong)


@pytest.mark.parametrize("wrong", [[1], [1, 2, 3], [1, 0], [1, -1], [1, True], [1, "2"], 2, None])
def test_weights_are_a_number_for_each_path(wrong):
    with pytest.raises(
        UsageError,
        match='"weights" in "nvme_offload" must have a number above 0 for each of the 2 "paths"',
    ):
        of(paths=["/a", "/b"], weights=wrong)


def test_weights_without_paths_are_refused():
    for section in ({"weights": [1]}, {"weights": []}):
        with pytest.raises(
            UsageError,
            match=r'^"weights" in "nvme_offload" are the shares of "paths", and there are none',
        ):
            of(**section)


ON_NVME = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}
PARAMETERS_ON_NVME = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}}
QUESTIONED = [
    *(
        (
            {name: section},
            f'nothing reads {name!r} in the DeepSpeed configuration: is it "nvme_offload", misspelt?',
        )
        for name, section in (
            ("nvme_ofload", {"host_memory": 1}),
            ("nvme-offload", {}),
            ("NVMe_Offload", {}),
            ("nvme", {}),
            ("offload", {"host_memory": "8GB"}),
            ("zero3", {"overlap_step": True, "backend": "posix"}),
        )
    ),
    (
        {"paths": ["/a", "/b"]},
        '"paths" at the top level of the DeepSpeed configuration is no setting of nvme_offload: '
        'if it is meant as one, move it to the section "nvme_offload"',
    ),
    (
        {
            "nvme_offload": {"host_memory": "1GB"},
            "nvme-offload": {"overlap_step": True},
            "zero_optimization": ON_NVME,
        },
        "nothing reads 'nvme-offload' in the DeepSpeed configuration",
    ),
    (
        {"nvme_offload": {"host_memory": "900TB"}, "zero_optimization": ON_NVME},
        '"host_memory" of 819 TiB is more than the ',
    ),
    (
        {"nvme_offload": {"host_memory": "1GB"}, "zero_optimization": {"stage": 3}},
        '"nvme_offload" in the DeepSpeed configuration has no effect: neither',
    ),
    *(
        (
            {"nvme_offload": {key: value}, "zero_optimization": PARAMETERS_ON_NVME},
            f'"{key}" in "nvme_offload" has no effect: "offload_optimizer" does not have "device"',
        )
        for key, value in (
            ("state_format", "split"),
            ("missing_gradients", "zero"),
            ("update_device", "cpu"),
        )
    ),
    (
        {
            "nvme_offload": {"swappers": "deepspeed", "host_memory": "1GB", "checksum": True},
            "zero_optimization": ON_NVME,
        },
        "'checksum', 'host_memory' in \"nvme_offload\" has no effect on DeepSpeed's own swappers",
    ),
    (
        {"aio": {"num_threads": 2, "queue_dept": 3}},
        "nothing reads 'num_threads', 'queue_dept' in the section \"aio\": is it misspelt?",
    ),
    (
        {"aio": {"use_gds": True}, "zero_optimization": ON_NVME},
        '"use_gds" in the section "aio" has no effect',
    ),
]


@pytest.mark.parametrize(("ds_config", "said"), QUESTIONED)
def test_what_is_surely_not_meant_is_questioned_once(ds_config, said, caplog, monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())
    for _ in range(2):
        check(ds_config)
    (message,) = caplog.messages
    assert message.startswith(said)


@pytest.mark.parametrize(
    "ds_config",
    [
        {},
        {
            "nvme_offload": {"host_memory": "1GB"},
            "nvme_ofload": {},
            "zero_optimization": ON_NVME,
        },
        {"activation_checkpointing": {}, "aio": {}, "offload": {}, "zero_optimization": None},
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                "offload_param": None,
            }
        },
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {**ON_NVME, "host_memory": "8GB"}},  # DeepSpeed refuses it
        {
            "nvme_offload": {"missing_gradients": "last", "state_format": "exact"},
            "zero_optimization": PARAMETERS_ON_NVME,
        },
    ],
)
def test_what_may_be_meant_is_not_questioned(ds_config, caplog, monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())
    check(ds_config)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("zero", "name", "section", "stages"),
    [
        ({"stage": 0}, "offload_param", {}, "3"),
        ({"stage": 1}, "offload_param", {}, "3"),
        ({"stage": 2}, "offload_param", {}, "3"),
        ({"stage": "2"}, "offload_param", {}, "3"),
        ({"stage": "0"}, "offload_optimizer", {}, "1 or 2 or 3"),
        ({}, "offload_param", {}, "3"),
        ({"stage": 0}, "offload_optimizer", {}, "1 or 2 or 3"),
        ({}, "offload_optimizer", {}, "1 or 2 or 3"),
        ({"stage": 0}, "offload_optimizer", {"swappers": "deepspeed"}, "3"),
        ({"stage": 2}, "offload_optimizer", {"swappers": "deepspeed"}, "3, or leave swappers out"),
    ],
)
def test_a_stage_that_keeps_everything_in_memory_is_refused(zero, name, section, stages):
    ds_config = {
        "zero_optimization": {**zero, name: {"device": "nvme", "nvme_path": "/a"}},
        "nvme_offload": section,
    }
    expected = f'"{name}" has "device": "nvme", and with "stage": {zero.get("stage", 0)} DeepSpeed .*: set "stage": {stages}, or train'
    with pytest.raises(UnsupportedError, match=expected):
        check(ds_config)


@pytest.mark.parametrize(
    ("ds_config", "place"),
    [
        ({}, "at the top level of the DeepSpeed configuration"),
        ({"zero": {"stage": 3}}, 'in "zero"'),
    ],
)
@pytest.mark.parametrize("name", ["offload_param", "offload_optimizer"])
def test_an_offload_outside_of_its_section_is_refused(name, ds_config, place):
    outer = {**copy.deepcopy(ds_config), "zero_optimization": {"stage": 3}}
    outer.get("zero", outer)[name] = {"device": "nvme", "nvme_path": "/a"}
    with pytest.raises(
        UsageError, match=f'"{name}" with "device": "nvme" has no effect {place}: move'
    ):
        check(outer)


@pytest.mark.parametrize("stage", [1, "2", 3.0, "3"])
def test_the_stage_may_be_written_as_a_string(stage):
    section = {"device": "nvme", "nvme_path": "/a"}
    ds_config = {"zero_optimization": {"stage": stage, "offload_optimizer": section}}
    check(ds_config)  # is not refused
    assert zero_stage(ds_config) == int(stage)
    assert offloads(ds_config) == (int(stage) < 3)


@pytest.mark.parametrize("zero", [True, False, None, {"stage": "three"}])
def test_what_is_no_stage_offloads_nothing(zero):
    assert not offloads({"zero_optimization": zero})


@pytest.mark.parametrize("key", ["host_memory", "overlap_step", "state_format", "swappers"])
def test_a_key_of_the_section_at_the_top_level_is_refused(key):
    with pytest.raises(UsageError, match=f'"{key}" has no effect at the top level'):
        check({key: 1, "nvme_offload": {}})


@pytest.mark.parametrize("section", [None, [], "native", 1, True])
def test_the_section_is_a_section(section):
    for read in (Settings.of, check):
        with pytest.raises(
            UsageError,
            match=r'"nvme_offload" in the DeepSpeed configuration must be a section, \{\.\.\.\}',
        ):
            read({"nvme_offload": section, "zero_optimization": PARAMETERS_ON_NVME})


def test_the_engine_is_made_as_the_section_aio_says():
    aio = {
        "block_size": 1 << 16,
        "queue_depth": 7,
        "single_submit": True,
        "overlap_events": False,
        "intra_op_parallelism": 3,
        "use_gds": False,
    }
    expected = AioConfig(
        block_size=1 << 16,
        queue_depth=7,
        single_submit=True,
        overlap_events=False,
        thread_count=3,
        backend="posix",
        direct="auto",
    )
    assert aio_config({"aio": aio}, of(backend="posix"), "/nowhere") == expected


@pytest.mark.parametrize(
    ("threads", "thread_count"),
    [
        ({}, AioConfig().thread_count),
        ({"thread_count": 2}, 2),
        ({"intra_op_parallelism": 3}, 3),
        ({"intra_op_parallelism": 3, "thread_count": 2}, 3),
    ],
)
def test_deepspeeds_key_for_threads_is_the_one_that_counts(threads, thread_count):
    assert aio_config({"aio": threads}, Settings(), "/nowhere").thread_count == thread_count


@pytest.mark.parametrize("wrong", [[1], "on", 1, True, []])
def test_a_section_aio_that_is_no_section_is_refused(wrong):
    for read in (
        lambda ds_config: aio_config(ds_config, Settings(), "/nowhere"),
        check,
    ):
        with pytest.raises(UsageError, match=r'"aio" in the .* must be a section, \{\.\.\.\}'):
            read({"aio": wrong})
    check({"aio": None})


@pytest.mark.parametrize(
    "wrong", [{"block_size": 1000}, {"queue_depth": 0}, {"intra_op_parallelism": "two"}]
)
def test_a_setting_that_the_engine_refuses_is_named(wrong):
    with pytest.raises(UsageError) as refusal:
        aio_config({"aio": wrong}, Settings(), "/nowhere")
    assert (
        "thread_count" in str(refusal.value)
        if "intra_op_parallelism" in wrong
        else next(iter(wrong)) in str(refusal.value)
    )


def test_without_the_section_and_a_profile_the_defaults_hold_and_say_so(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    with caplog.at_level(logging.INFO, "nvme_offload"):
        assert aio_config({}, of(backend="posix"), str(tmp_path)) == AioConfig(
            backend="posix", direct="auto"
        )
    assert f"no tuned settings for {tmp_path}" in caplog.text


def test_paths_are_from_the_root_on_whatever_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert of(paths=["drive", "~/drive", "/a/../b"]).paths == (
        f"{tmp_path}/drive",
        "/home/somebody/drive",
        "/b",
    )
    sections = {
        "offload_param": {"device": "nvme", "nvme_path": "drive"},
        "offload_optimizer": {"device": "nvme", "nvme_path": f"{tmp_path}/drive"},
    }
    assert nvme_paths({"zero_optimization": sections}) == (f"{tmp_path}/drive",)


@pytest.mark.parametrize("wrong", ["file", "file/below", "/proc/none"])
def test_a_place_that_can_be_no_directory_is_refused_with_its_name(tmp_path, wrong):
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError,
        match=re.escape(str(tmp_path / wrong))
        + " (is not a directory|does not exist), and is not created: ",
    ):
        tier_of({"nvme_offload": {"paths": [str(tmp_path / wrong)]}})
    with pytest.raises(
        UsageError, match=r" (is not a directory|does not exist), and is not created: "
    ):
        NVMeOptimizer([torch.nn.Parameter(torch.ones(1))], paths=str(tmp_path / wrong))
    with pytest.raises(
        UsageError, match=r" (is not a directory|does not exist), and is not created: "
    ):
        save_on_nvme(str(tmp_path / wrong))


def test_a_place_in_memory_and_a_key_that_nothing_reads_are_reported(caplog, monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        ds_config = {
            "nvme_offload": {"paths": [place], "backend": "posix", "host_memory": 1 << 20},
            "aio": {"num_threads": 4, "queue_depth": 4, "use_gds": False},
            "zero_optimization": ON_NVME,
        }
        check(ds_config)
        tier = tier_of(ds_config)
        tier.require(tier.cap_bytes + 1)
        tier.close()
    assert caplog.messages == [
        "nothing reads 'num_threads' in the section \"aio\": is it misspelt?",
        f'{place} is in memory (tmpfs): values offloaded there take host memory in addition to "host_memory"',
    ]


ON_A_DRIVE = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/drive"}}


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("zenflow", {"zero_optimization": {**ON_A_DRIVE, "zenflow": {"topk_ratio": 0.1}}}),
        (
            "super_offload",
            {
                "zero_optimization": {
                    **ON_A_DRIVE,
                    "offload_optimizer": {"device": "cpu", "super_offload": True},
                }
            },
        ),
        ("writer", {"zero_optimization": ON_A_DRIVE, "checkpoint": {"writer": {"type": "fast"}}}),
        ("deepcompile", {"zero_optimization": ON_A_DRIVE, "compile": {"deepcompile": True}}),
        (
            "zero_hpz_partition_size",
            {"zero_optimization": {**ON_A_DRIVE, "zero_hpz_partition_size": 2}},
        ),
        (
            "zero_quantized_nontrainable_weights",
            {"zero_optimization": {**ON_A_DRIVE, "zero_quantized_nontrainable_weights": True}},
        ),
    ],
)
def test_what_works_in_memory_only_is_refused_with_its_key(key, asked):
    with pytest.raises(
        UnsupportedError, match=f'^"{key}" in ".*" works with .* in memory only: leave it out'
    ):
        check(asked)
    check({**asked, "nvme_offload": {"swappers": "deepspeed"}})
    check(
        {
            **asked,
            "zero_optimization": {**asked["zero_optimization"], "offload_param": {"device": "cpu"}},
        }
    )


@pytest.mark.parametrize(
    "harmless",
    [
        {},
        {"checkpoint": {"tag_validation": "Ignore"}},
        {"checkpoint": {"writer": None}},
        {"checkpoint": None},
        {"compile": {"deepcompile": False}},
    ],
)
def test_what_works_anywhere_is_not_refused(harmless):
    offload = {"device": "nvme", "nvme_path": "/drive", "super_offload": False}
    stage3 = {"stage": 3, "offload_optimizer": offload}
    check({"zero_optimization": {**stage3, "zenflow": None}, **harmless})
    for zero in (
        {**stage3, "zero_hpz_partition_size": 2},
        {**ON_A_DRIVE, "zero_hpz_partition_size": 1, "zero_quantized_nontrainable_weights": False},
    ):
        check({"zero_optimization": zero, **harmless})


@pytest.mark.parametrize("wrong", [["/a"], 1, True, {"a": "/a"}], ids=str)
def test_the_path_is_one_directory(wrong):
    sections = {"offload_param": {"device": "nvme", "nvme_path": wrong}}
    with pytest.raises(UsageError, match='"nvme_path" of "offload_param" is one directory, not'):
        nvme_paths({"zero_optimization": sections})
