from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from nvme_offload.ds_config.edit import aio_section
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, PHASES
from nvme_offload.report import render
from nvme_offload.report.render import html

TIMES, DASH = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
BESIDE_THE_PAGE = {"profile.json", "ds_config.json"}
LEADING = {"src", "href", "xlink:href", "action", "srcset", "poster", "data", "background"}


def test_the_page_is_well_formed(made_up, shape):
    page = made_up.page_of(shape)  # takes it apart: tags close in order, no attribute stands twice
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [
        attributes[name]
        for _, attributes in page.elements
        for name in ("href", "aria-labelledby")
        if name in attributes
    ]
    inner = {target.removeprefix("#") for target in targets} - BESIDE_THE_PAGE
    assert inner <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", page.source)) <= set(ids)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels


def test_a_screen_reader_finds_its_way(made_up, shape):
    page = made_up.page_of(shape)
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all(
        "meta"
    )
    for landmark in ("header", "main", "nav", "footer"):
        assert len(page.all(landmark)) == 1, landmark
    assert all(
        section.get("aria-labelledby") or section.get("aria-label")
        for section in page.all("section")
    )
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(header.get("scope") in ("col", "row") for header in page.all("th"))


def test_no_request_leaves_the_page(made_up, shape):
    page = made_up.page_of(shape)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in LEADING:
                inside = value.startswith("#")
                assert inside or value in BESIDE_THE_PAGE, f"<{tag} {name}={value[:80]}>"
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page.source))
    assert not re.search(r"https?:|//[a-z]|@import|@font-face|fetch\(|XMLHttpRequest", page.source)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {
        tag for tag, _ in page.elements
    }


def test_the_policy_allows_one_script_and_nothing_else(made_up):
    page = made_up.page_of("one path")
    policy = next(
        meta["content"]
        for meta in page.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    )
    script = re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert dict(rule.split(" ", 1) for rule in policy.split("; ")) == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "script-src": f"'sha256-{digest}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_answer_comes_first(made_up):
    page = made_up.page_of("one path")
    words = page.words
    assert "Use 1 MiB blocks, queue depth 16, 2 threads" in words
    mixed = made_up.best(made_up.chosen, "mixed")
    sure = f"(90 % interval {mixed.relative_low:.2f}{DASH}{mixed.relative_high:.2f}{TIMES})"
    assert (
        f"{mixed.relative:.2f} times as fast as DeepSpeed's defaults {sure} at reading and writing together"
        in words
    )
    for phase in PHASES:
        best = made_up.best(made_up.chosen, phase)
        assert (
            f"{best.gb_per_s:#.3g} GB/s {best.relative:.2f}{TIMES} the defaults ({made_up.control_speed[phase]:#.3g} GB/s)"
            in words
        )
        assert (
            f"90 % interval {best.relative_low:.2f}{DASH}{best.relative_high:.2f}{TIMES}" in words
        )
    assert "The drive was steady in the last stage" in words
    assert "mounted with discard" in words


def test_everything_to_repeat_it_is_there(made_up):
    words = made_up.page_of("one path").words
    for said in (
        "nvme-sweep /local_nvme",
        "File read 1 GiB, write 1.5 GiB Request 64 MiB Ranks 1 Direct yes Verified yes Seconds 60 s",
        "Engine native Backend libaio Kernel 6.8.0-made-up Versions nvme_offload 0.0.0, python 3.11.9",
        "Firmware 4B2QJXD7",
    ):
        assert said in words
    assert "S3CR3T" not in made_up.page_of("one path").source  # a serial number is private


def test_the_block_to_copy_is_what_deepspeed_reads(made_up):
    expected = {"aio": aio_section(made_up.chosen)}
    text = "".join(made_up.page_of("one path").text)
    assert (
        json.loads(text[text.index('{\n  "aio"') : text.index("\n}", text.index('{\n  "aio"')) + 2])
        == expected
    )
    whole = text[text.index("{\n", text.index("A complete config")) :]
    assert json.loads(whole[: whole.index("\n}") + 2])["aio"] == expected["aio"]


def test_the_code_to_copy_gives_the_setting(made_up):
    page = made_up.page_of("one path")
    call = re.search(r"AioConfig\((.*?)\)", "".join(page.text), re.DOTALL)
    assert call is not None
    assert eval(f"dict({call[1]})") == dataclasses.asdict(made_up.chosen)
    assert 'DeepSpeedStrategy(config="ds_config.json")' in page.words
    assert 'deepspeed="ds_config.json"' in page.words
    assert "deepspeed_config_file: ds_config.json" in page.words
    assert "accelerate launch --config_file accelerate.yaml train.py" in page.words
    assert "deepspeed.initialize(" in page.words
    assert "you would run 1 thread instead of 2" in page.words


def test_blocks_can_be_read_and_selected_without_scripts(made_up):
    page = made_up.page_of("one path")
    assert page.all("button") == []  # the script makes them
    assert len(page.all("pre")) >= 8
    assert all(block["tabindex"] == "0" and block["aria-label"] for block in page.all("pre"))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("one path", "carries 7.88 GB/s each way: reads take"),
        ("latencies", "and the latency of a block of 1 MiB with full queues"),
        ("sustained, a cache that ends", "After 72 GB the drive fell from 4.50 to 0.500 GB/s"),
        (
            "sustained, a cache that ends",
            "One step of a 7 B model writes 84 GB, more than the drive's cache holds: count on 0.500 GB/s",
        ),
        ("sustained, no end", "no end of a cache was seen"),
        ("several paths", "/mnt/second /dev/nvme1n1 2 MiB"),
        ("one path", "This measures its size: nvme-sweep /local_nvme --sustained 64GiB"),
        ("worn", "Rated life used 5 % 5 %"),
        ("8 ranks", "8 concurrent ranks"),
        ("DeepSpeed's op", "DeepSpeed's own op"),
        ("DeepSpeed's op", "Deepspeed 0.19.8"),
        ("ten seconds, not steady", "The drive was not steady in the last stage"),
        ("bare", "reports no PCIe link"),
    ],
)
def test_what_was_measured_is_said(made_up, shape, said):
    assert said in made_up.page_of(shape).words


def test_a_gain_that_cannot_be_measured_is_not_claimed(made_up):
    doubtful = {
        phase: dataclasses.replace(
            made_up.best(made_up.chosen, phase),
            relative=1.01,
            relative_low=0.98,
            relative_high=1.04,
        )
        for phase in PHASES
    }
    profile = made_up.brief(performance=doubtful)
    page = made_up.page(html(profile))
    assert "It does not differ significantly from DeepSpeed's defaults" in page.words
    assert "times as fast" not in page.words
    assert page.words.count("no significant difference") == 3


@pytest.mark.parametrize("backend", ["libaio", "io_uring"])
def test_the_defaults_chosen_are_named_so(made_up, backend):
    def on_backend(one):
        return dataclasses.replace(one, backend=backend)

    whole = made_up.brief()
    same = {phase: on_backend(made_up.best(DEEPSPEED_DEFAULTS, phase)) for phase in PHASES}
    changes = {
        "chosen": on_backend(DEEPSPEED_DEFAULTS),
        "performance": same,
        "finals": {phase: tuple(map(on_backend, each)) for phase, each in whole.finals.items()},
        "trials": tuple(map(on_backend, whole.trials)),
    }
    words = made_up.page(html(dataclasses.replace(whole, **changes))).words
    assert "no setting of the last stage is significantly better" in words
    assert "times as fast" not in words


HOSTILE = "<script>alert(1)</script> \"' | *x* `y` [z](//evil) & </style>\u202e"


def test_text_from_outside_stays_text(made_up):
    whole = made_up.shapes["everything"]()
    drive = {
        **whole.drive,
        "model": HOSTILE,
        "path": f"/it's a {HOSTILE}",
        "firmware": HOSTILE,
        "mount_options": [HOSTILE],
    }
    profile = dataclasses.replace(
        whole,
        drive=drive,
        command=f"nvme-sweep {shlex.quote(HOSTILE)}",
        warnings=(HOSTILE, "a | b <img src=x>"),
        reasons=(HOSTILE,),
        engine={HOSTILE: HOSTILE, "name": HOSTILE},
        workload={"ranks": 1, "x": {HOSTILE: HOSTILE}},
        beside=tuple(dataclasses.replace(other, version=HOSTILE) for other in whole.beside),
        stripe=tuple(
            dataclasses.replace(path, path=HOSTILE, model=HOSTILE) for path in whole.stripe
        ),
        health_after=dataclasses.replace(whole.health_after, critical=HOSTILE, source=HOSTILE),
    )
    page = made_up.page(html(profile))
    plain = made_up.page_of("everything")
    for tag in ("script", "style", "img", "code", "button", "a"):
        extra = 3 if tag == "code" else 0  # what stands between backticks in a sentence is code
        assert len(page.all(tag)) - len(plain.all(tag)) in range(extra + 1), tag
    assert page.words.count("<script>alert(1)</script>") >= 10


def contrast(one: str, other: str) -> float:
    """Source: WCAG 2.2, relative luminance and contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


STYLE = Path(render.__file__).parent / "templates" / "style.css"
THEMES = re.findall(r"(?<=[{;] )--paper: [^}]*", STYLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark", "print"])
def test_text_stands_out(theme):
    colours = dict(re.findall(r"--(\w+): (#\w{6});", theme))
    for ground in ("paper", "panel", "code"):
        for text in ("ink", "soft", "read", "write", "mixed", "slower", "good", "care"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for fill in ("mixed", "slower"):  # of the heat map, at its strongest
        parts = (
            [int(colours[name][at : at + 2], 16) for at in (1, 3, 5)] for name in (fill, "panel")
        )
        mixed = "".join(f"{round(0.45 * a + 0.55 * b):02x}" for a, b in zip(*parts, strict=True))
        assert contrast(colours["ink"], f"#{mixed}") >= 4.5, fill


def test_the_same_profile_gives_the_same_page(made_up):
    assert (
        html(made_up.shapes["ten seconds, not steady"]())
        == made_up.page_of("ten seconds, not steady").source
    )
