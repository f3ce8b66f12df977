"""Pages opened in a browser from a local server, and a record of what happened meanwhile.

Without a browser or a built book, the tests that need them are skipped. They fail instead if ORTHO_BROWSER is
"required", as `make browser` sets it.
"""

import os
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "_build" / "html"
DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
MATHJAX = "tex-svg-full.js"
PATIENCE = 120_000  # milliseconds: nothing here measures time, and the machine may be busy

TOC = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
WRITTEN = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]
MADE = ["genindex", "prf-prf", "py-modindex", "search"]  # pages made by Sphinx and its extensions
# Folded sections are looked at, too.
UNFOLD = "document.querySelectorAll('details.evidence').forEach((folded) => { folded.open = true })"
SOURCE = "a.btn-download-source-button"


def missing(what):
    (pytest.fail if os.environ.get("ORTHO_BROWSER") == "required" else pytest.skip)(what)


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@contextmanager
def served(folder):
    """The address that serves the files of `folder` while the block runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def new_context(browser, **options):
    """A browser context that shares nothing with others; its pages contain the checks, and `with` closes it."""
    context = browser.new_context(viewport=DESK, reduced_motion="reduce", **options)
    context.set_default_timeout(PATIENCE)
    context.add_init_script(path=Path(__file__).with_name("checks.js"))
    return context


class Visit:
    """A page that was opened, and what happened meanwhile.

    trouble: complaints on the console, errors of scripts, requests that failed or were meant for another machine
    loaded: bytes of everything that was fetched from the server, by address
    """

    def __init__(self, context, address):
        self.server = "/".join(address.split("/")[:3]) + "/"
        self.trouble: list[str] = []
        self.loaded: dict[str, int] = {}
        self.page = context.new_page()
        self.page.route(lambda url: not url.startswith(self.server), self.refuse)
        self.page.on("console", self.note_message)
        self.page.on("pageerror", lambda error: self.trouble.append(f"script: {error}"))
        self.page.on("requestfailed", lambda request: self.trouble.append(f"{request.failure}: {request.url}"))
        self.page.on("response", self.note_response)
        self.page.goto(address)
        self.page.evaluate("async () => { await window.MathJax?.startup?.promise }")
        self.page.evaluate(UNFOLD)

    def refuse(self, route):
        self.trouble.append(f"asks another machine: {route.request.url}")
        route.abort()

    def note_message(self, message):
        if message.type in ("error", "warning"):
            self.trouble.append(f"console, {message.type}: {message.text} ({message.location['url']})")

    def note_response(self, response):
        if not response.ok:
            self.trouble.append(f"{response.status}: {response.url}")
        self.loaded[response.url] = int(response.headers.get("content-length", 0))

    @property
    def weight(self):
        """Bytes of a first visit, uncompressed: everything that was fetched except MathJax."""
        return sum(size for address, size in self.loaded.items() if MATHJAX not in address)

    def check(self, name):
        """What a function of checks.js returns."""
        return self.page.evaluate(f"checks.{name}()")

    def violations(self, **options):
        """What axe-core objects to."""
        from axe_playwright_python.sync_playwright import Axe

        # When axe preloads style sheets, it looks for their imports in the root folder.
        response = Axe().run(self.page, options={**options, "resultTypes": ["violations"], "preload": False}).response
        return [
            f"{rule['id']}: {node['html'][:200]} {[reason['message'] for reason in node['any']]}"
            for rule in response["violations"]
            for node in rule["nodes"]
        ]

    def put_on(self, scheme):
        """Show the page as it looks on a system with a light or a dark colour scheme."""
        self.page.emulate_media(color_scheme=scheme)
        self.page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)
