"""Links and paths in the documentation: every relative link, and every path of this repository in backticks, exists."""

import re

from tests.harness.each import each
from tests.helm.rendering import CHART, ROOT

PAGES = [ROOT / "README.md", *sorted(CHART.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = "benchmarks|deploy|docs|helm|learner|rollout|services|tests|verifier"
PATH = re.compile(rf"`((?:{FOLDERS})/[^`\s]*)`")
PLACEHOLDER = re.compile(r"[A-Z]{3,}|[<>$*{}…]|\.\.\.")
"""A part of a path that stands for something else: AREA/NAME.md, a pattern."""

of_each_page = each("page", PAGES, called=lambda page: page.relative_to(ROOT))


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@of_each_page
def test_every_relative_link_of_a_page_has_a_target(page):
    for link in LINK.findall(page.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


@of_each_page
def test_every_path_in_backticks_exists(page):
    for path in PATH.findall(page.read_text()):
        name = path.partition("::")[0].rstrip(".,;:")
        if PLACEHOLDER.search(name.replace("README", "").replace("NOTES", "")):
            parent = PLACEHOLDER.split(name)[0].rpartition("/")[0]
            assert (ROOT / parent).exists(), path
        else:
            assert (ROOT / name).exists(), path


def test_every_page_is_read():
    assert len(PAGES) > 50
