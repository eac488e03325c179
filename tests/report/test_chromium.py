"""The page as Chromium shows it: wide and on a phone, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE

# A window of Chromium is 500 pixels wide at the least, a frame in it as narrow as one likes.
FRAME = """<!doctype html>
<meta name="color-scheme" content="light dark">
<script>addEventListener("message", event => { document.documentElement.dataset.probe = event.data; });</script>
<iframe src="report.html" style="width: %dpx; height: 2000px; border: 0"></iframe>"""

# Comes before the page's policy, which would block it.
PROBE = """<script>
const problems = [];
addEventListener("error", event => problems.push("error: " + event.message));
addEventListener("unhandledrejection", event => problems.push("rejection: " + event.reason));
document.addEventListener("securitypolicyviolation", event => problems.push("policy: " + event.violatedDirective + " " + event.blockedURI));
addEventListener("load", () => {
  const root = document.documentElement, style = getComputedStyle(document.body);
  const scrollers = ".scroll, pre, .unseen, .skip";
  const outside = [...document.body.querySelectorAll("*")].filter(element => {
    if (element.closest(scrollers) && !element.matches(".scroll, pre")) return false;
    const box = element.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5);
  });
  parent.postMessage(JSON.stringify({
    width: innerWidth, scrolls: root.scrollWidth, problems,
    outside: outside.map(element => element.tagName + "." + element.getAttribute("class")),
    ground: style.backgroundColor, ink: style.color,
    buttons: [...document.querySelectorAll(".code")].map(box => [...box.querySelectorAll("button")].map(button => button.getAttribute("aria-label")).join()),
    requests: performance.getEntriesByType("resource").map(entry => entry.name),
  }), "*");
});
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
        ),
        None,
    )
    if found is None:
        pytest.skip("no Chromium here: the page is looked at by no browser")
    return found


def look(chromium: str, source: str, directory: Path, width: int, dark: bool) -> dict:
    (directory / "report.html").write_text(
        source.replace("<head>", "<head>" + PROBE, 1), encoding="utf-8"
    )
    frame = directory / "frame.html"
    frame.write_text(FRAME % width, encoding="utf-8")
    command = [
        *(
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--enable-logging=stderr", "--no-first-run", "--disable-extensions"),
        ),
        *(
            f"--user-data-dir={directory / 'profile'}",
            f"--window-size={width + 200},2200",
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        ),
        *("--virtual-time-budget=2000", "--dump-dom", frame.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found is not None, done.stderr
    assert [line for line in done.stderr.split("\n") if ":CONSOLE" in line] == []
    return json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))


def rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*(int(colour[at : at + 2], 16) for at in (1, 3, 5)))


@pytest.mark.parametrize(
    ("width", "dark"),
    [(1280, False), (390, True)],
    ids=["wide", "phone, dark"],
)
def test_nothing_sticks_out_and_nothing_complains(made_up, chromium, tmp_path, width, dark):
    page = made_up.page_of("everything")
    seen = look(chromium, page.source, tmp_path, width, dark)
    assert seen["problems"] == []
    assert seen["requests"] == []
    assert seen["width"] == width
    assert seen["scrolls"] == width
    assert seen["outside"] == []
    colours = ("#111417", "#e9e7e2") if dark else ("#f6f5f2", "#1b1f24")  # of style.css
    assert (seen["ground"], seen["ink"]) == tuple(map(rgb, colours))
    assert seen["buttons"] == [f"Copy: {block['aria-label']}" for block in page.all("pre")]
