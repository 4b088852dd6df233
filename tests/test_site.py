"""The site of `make docs`: no page is wider than a phone; the search finds what one would type."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import browser

pytestmark = [pytest.mark.ci, browser.needed]
REPOSITORY = Path(__file__).parents[1]
PAGES = ["", "tutorial/", "choosing-a-plan/", "how-do-i/", "faq/", "guides/pipelines/",
         "guides/optimizers/", "guides/extending/", "coming-from/jax/", "performance/"]  # fmt: skip
FIRST = {
    "early stopping": "how-do-i/#stop-early",
    "checkpoint": "how-do-i/#resume-from-a-checkpoint",
    "resume": "how-do-i/#resume-from-a-checkpoint",
    "gpu": "how-do-i/#use-a-gpu",
    "multi gpu": "how-do-i/#use-all-gpus-of-a-machine-multi-gpu-ddp",
    "ddp": "how-do-i/#use-all-gpus-of-a-machine-multi-gpu-ddp",
    "fsdp": "how-do-i/#split-a-network-that-does-not-fit-on-one-device-fsdp-zero",
    "lora": "how-do-i/#fine-tune-with-lora",
    "mixed precision": "how-do-i/#use-bfloat16-mixed-precision",
    "learning rate schedule": "how-do-i/#use-a-learning-rate-schedule-and-see-it",
}
"""The section that the search names first."""

TOO_WIDE = """(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = (node) => {
    for (let at = node; at && at !== document.body; at = at.parentElement)
      if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(at).overflowX)
          && at.getBoundingClientRect().right <= width + 1) return true;
    return false;
  };
  return [...document.querySelectorAll('main *')]
    .filter((node) => node.getBoundingClientRect().width
            && node.getBoundingClientRect().right > width + 1 && !scrolls(node))
    .map((node) => node.outerHTML.slice(0, 80));
})()"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built and served, or of the one that `PLURAX_TEST_SITE` names."""
    folder = Path(os.environ.get("PLURAX_TEST_SITE") or tmp_path_factory.mktemp("site"))
    if "PLURAX_TEST_SITE" not in os.environ:
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
        subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300, capture_output=True)
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def visit(page, address):
    page.send("Page.navigate", url=address)
    page.wait("location.protocol === 'http:' && document.readyState === 'complete'")


@pytest.mark.parametrize(("width", "phone"), [(390, True), (1280, False)])
def test_no_page_is_wider_than_the_window(site, width, phone):
    with browser.Browser(width, 844, phone=phone) as page:
        for name in PAGES:
            visit(page, site + name)
            assert page.run(TOO_WIDE) == [], name
            assert page.run("document.documentElement.scrollWidth") <= width, name


def test_timelines_and_pictures_scroll_on_a_phone(site):
    with browser.Browser(390, 844, phone=True) as page:
        visit(page, site + "guides/pipelines/")
        code = "[...document.querySelectorAll('{}')].some((one) => one.scrollWidth > 400)"
        assert page.run(code.format(".language-text pre > code"))
        assert page.run(code.format("p:has(> img)"))


def test_the_search_finds_what_a_newcomer_types(site):
    with browser.Browser() as page:
        found = {}
        for words in FIRST:
            visit(page, site + "?q=" + words.replace(" ", "+"))
            page.wait("document.querySelector('.md-search-result__item h2')")
            link = "[...document.querySelectorAll('.md-search-result__item a')].map((a) => a.href)"
            sections = [one for one in page.run(link) if "#" in one]
            found[words] = sections[0].removeprefix(site)
    found = {words: link.split("?")[0] + "#" + link.split("#")[1] for words, link in found.items()}
    assert found == FIRST
