"""Headless Chromium for tests of the page in browser/page/: Debian's browser, driven by playwright."""

import contextlib
import importlib.util
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from browser.serve import make_server

WEB = Path(__file__).resolve().parent.parent / "page"
PACKAGES = ("onnxruntime-web", "@huggingface/tokenizers", "@huggingface/jinja")


def missing() -> str:
    """What the page cannot be tested without, and how to get it; "" where all is there."""
    if not shutil.which("chromium"):
        return "no chromium: apt-get install chromium"
    if not importlib.util.find_spec("playwright"):
        return "no playwright: pip install -r requirements-dev.txt"
    if not all((WEB / "node_modules" / name / "package.json").exists() for name in PACKAGES):
        return "no browser/page/node_modules: npm ci --ignore-scripts --prefix browser/page"
    return ""


@contextlib.contextmanager
def chromium() -> Iterator:
    """A playwright Browser. Without Chromium's sandbox: as root there is none."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@contextlib.contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    """Its address, in this process."""
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def isolated_server(models: Path):
    return served(make_server(models, 0))


def plain_server():
    """As python -m http.server, which isolates nothing."""
    return served(ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(WEB))))


def until(page, condition: Callable[[], object], seconds: float = 120):
    """What condition() returned once it was true. Playwright's own way would need eval, which the page forbids."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited too long; the page says: {page.inner_text('body')[:2000]}"
        page.wait_for_timeout(20)
    return found


def loaded(page) -> str:
    """What the page says of a folder once it is done with it: ready, cancelled, or the problem."""
    until(page, lambda: page.is_hidden("#loading"))
    return page.inner_text("#loader-status") or page.inner_text("#loader-problem")


def load_folder(page, folder: Path) -> str:
    """Chosen as a user chooses it."""
    page.set_input_files("#folder", folder)
    return loaded(page)


# in the page: the modules it is made of, without its buttons
GENERATE = """async ([path, asked]) => {
  const { readFolder, servedFolder } = await import("/folder.js");
  const { Engine } = await import("/engine.js");
  const engine = new Engine(), found = [];
  await engine.load(await readFolder(servedFolder(path), () => {}, new AbortController().signal));
  for (const [prompt, options] of asked) {
    found.push({ ...(await engine.generate(prompt, options, () => {})), threads: engine.threads });
  }
  engine.end("done");
  return found;
}"""
