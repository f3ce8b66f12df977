"""Public files by their checksum: what is fetched, kept, refused and said. Nothing here needs a network."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paper.tasks.download import RemoteFile, fetch

CONTENT = bytes(range(256)) * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of an empty cache; no local folder is named, and no proxy asked for this machine's own addresses."""
    monkeypatch.delenv("ORTHO_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ortho"


@pytest.fixture
def served(tmp_path):
    """A remote file with an address of its own, and the path where it lies."""
    path = tmp_path / "served"
    path.write_bytes(CONTENT)
    return RemoteFile("some/numbers", path.as_uri(), SHA256, len(CONTENT)), path


@pytest.fixture
def server():
    """A function that sets how a server on this machine answers, and returns its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.answer(self)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=partial(running.serve_forever, poll_interval=0.01), daemon=True).start()

        def start(answer):
            running.answer = answer
            return f"http://127.0.0.1:{running.server_port}/numbers"

        yield start
        running.shutdown()


def answer(handler, content=CONTENT, length=None, status=200):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


def files(folder):
    return [path for path in folder.rglob("*") if not path.is_dir()]


def test_a_file_is_fetched_once_and_then_taken_from_the_cache(cache, server):
    asked = []
    url = server(lambda handler: (asked.append(handler.path), answer(handler)))
    file = RemoteFile("some/numbers", url, SHA256)
    path = fetch(file)
    assert path == cache / "some" / "numbers" and path.read_bytes() == CONTENT
    assert fetch(file) == path and asked == ["/numbers"]
    assert list(path.parent.iterdir()) == [path]


def test_several_may_fetch_a_file_at_once(cache, server):
    """Each writes a file of its own: all ask before the first is answered."""
    together = threading.Barrier(4)
    url = server(lambda handler: (together.wait(timeout=10), answer(handler)))
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(fetch, [RemoteFile("some/numbers", url, SHA256)] * 4))
    assert set(paths) == {cache / "some" / "numbers"} == set(files(cache)) and paths[0].read_bytes() == CONTENT


def test_the_cache_is_that_of_the_home_folder_where_none_is_named(tmp_path, monkeypatch, served):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, "", "relative"):
        monkeypatch.delenv("XDG_CACHE_HOME") if value is None else monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert fetch(served[0]) == tmp_path / ".cache" / "ortho" / "some" / "numbers"


@pytest.mark.parametrize("how", ["argument", "variable", "both"])
def test_a_local_folder_takes_the_place_of_cache_and_network(tmp_path, monkeypatch, cache, how):
    file = RemoteFile("some/numbers", "http://127.0.0.1:1/", SHA256)
    there = tmp_path / "local" / "some" / "numbers"
    there.parent.mkdir(parents=True)
    there.write_bytes(CONTENT)
    if how != "argument":
        monkeypatch.setenv("ORTHO_DATA", str(tmp_path / ("elsewhere" if how == "both" else "local")))
    assert fetch(file, None if how == "variable" else tmp_path / "local") == there
    assert not cache.exists()


def test_what_arrives_cut_or_changed_is_not_kept(cache, server):
    changed = CONTENT[:-1] + b"!"
    for sent, length in ((CONTENT[:-9], None), (CONTENT[:-9], len(CONTENT)), (changed, None), (b"", None)):
        file = RemoteFile("some/numbers", server(partial(answer, content=sent, length=length)), SHA256)
        got = hashlib.sha256(sent).hexdigest()
        with pytest.raises(ValueError, match=f"{file.url}: expected the sha256 {SHA256} .* got {got} from {len(sent)}"):
            fetch(file)
        assert files(cache) == []
    # Once the server works again, it is asked again.
    assert fetch(RemoteFile("some/numbers", server(answer), SHA256)).read_bytes() == CONTENT


def test_more_than_there_should_be_is_not_waited_for(cache, server):
    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):  # nobody listens any more
            for _ in range(1000):
                handler.wfile.write(CONTENT)

    file = RemoteFile("some/numbers", server(endless), SHA256, len(CONTENT))
    with pytest.raises(ValueError, match=f"expected {len(CONTENT)} bytes, got more"):
        fetch(file)
    assert files(cache) == []


@pytest.mark.parametrize("sends", [b"", b"a"])
def test_a_server_that_is_too_slow_is_left(cache, server, sends):
    left, ended = threading.Event(), threading.Event()

    def slow(handler):
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):
            for _ in range(500):  # for ten seconds, if it is not left
                if not left.wait(0.02):
                    handler.wfile.write(sends)
            ended.set()

    file = RemoteFile("some/numbers", server(slow), SHA256)
    with pytest.raises(ConnectionError, match="timed out" if not sends else "bytes after 0.2 s"):
        fetch(file, timeout=0.2)
    assert not ended.is_set()
    left.set()
    assert files(cache) == []


def test_a_damaged_file_is_refused_and_left_as_it_is(cache, served):
    file, _ = served
    path = fetch(file)
    path.write_bytes(CONTENT[:-1])
    for folder in (None, cache):  # as the cache, and as a local folder
        with pytest.raises(ValueError, match=f"{path}: expected the sha256 {SHA256}.*is not used; remove it"):
            fetch(file, folder)
    assert path.read_bytes() == CONTENT[:-1]


def test_who_is_offline_is_told_what_to_do(cache, server):
    broken = {
        "http://127.0.0.1:1/numbers": "refused",  # a port where nobody answers
        server(partial(answer, content=b"", status=404)): "404",
        (cache / "not there").as_uri(): "No such file",
    }
    for url, reason in broken.items():
        with pytest.raises(ConnectionError, match=reason) as caught:
            fetch(RemoteFile("some/numbers", url, SHA256))
        for word in (url, SHA256, str(cache / "some" / "numbers"), "ORTHO_DATA"):
            assert word in str(caught.value)
        assert files(cache) == []


def test_an_interrupt_before_the_last_step_leaves_nothing(cache, served, monkeypatch):
    """A kill would not leave a file of that name either."""

    def interrupt(own, target):
        assert own.read_bytes() == CONTENT and not target.exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch(served[0])
    assert list((cache / "some").iterdir()) == []
    assert fetch(served[0]).read_bytes() == CONTENT


@pytest.mark.parametrize("how", ["folder", "ORTHO_DATA"])
def test_a_local_folder_that_lacks_the_file_is_named(tmp_path, monkeypatch, cache, served, how):
    file, _ = served
    for folder, message in (
        (tmp_path / "none", "expected a folder that holds some/numbers, got .*none"),
        (tmp_path / "served", "expected a folder that holds some/numbers, got .*served"),  # a file
        (tmp_path, f"expected some/numbers in .*{file.url} .sha256 {SHA256}"),
    ):
        monkeypatch.setenv("ORTHO_DATA", str(folder if how == "ORTHO_DATA" else cache))
        with pytest.raises(FileNotFoundError, match=f"^{how}: {message}"):
            fetch(file, folder if how == "folder" else None)
    assert not cache.exists()


@pytest.mark.parametrize(
    "name", ["../../evil", "some/../../evil", "/evil", "..", "", ".", "some\\..\\..\\evil", "C:\\evil", "\\evil"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(name):
    with pytest.raises(ValueError, match="name: expected a file's place within a folder, as collection/file, got '"):
        RemoteFile(name, "http://127.0.0.1:1/", SHA256)
