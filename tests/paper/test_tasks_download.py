"""Public files by their checksum: what is fetched, kept, refused and said. Nothing here needs a network."""

import hashlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

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
def remote(tmp_path):
    """A file that a server on this machine has, and the folder in which the server finds it."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "numbers").write_bytes(CONTENT)

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path / "served")) as server:
        threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/numbers"
        yield RemoteFile("some/numbers", address, SHA256), tmp_path / "served" / "numbers"
        server.shutdown()


def test_a_file_is_fetched_once_and_then_taken_from_the_cache(cache, remote):
    file, served = remote
    path = fetch(file)
    assert path == cache / "some" / "numbers" and path.read_bytes() == CONTENT
    served.unlink()
    assert fetch(file) == path and list(path.parent.iterdir()) == [path]


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


def test_what_arrives_changed_is_not_kept(cache, remote):
    file, served = remote
    served.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="hash"):
        fetch(file)
    assert not list(cache.rglob("numbers"))
    served.write_bytes(CONTENT)
    assert fetch(file).read_bytes() == CONTENT


def test_a_damaged_file_is_refused_and_left_as_it_is(cache, remote):
    file, _ = remote
    path = fetch(file)
    path.write_bytes(CONTENT[:-1])
    for folder in (None, cache):  # as the cache, and as a local folder
        with pytest.raises(ValueError, match=f"{path}: expected the sha256 {SHA256}.*is not used; remove it"):
            fetch(file, folder)
    assert path.read_bytes() == CONTENT[:-1]


def test_who_is_offline_is_told_what_to_do(cache):
    file = RemoteFile("some/numbers", "http://127.0.0.1:1/numbers", SHA256)
    with pytest.raises(ConnectionError) as caught:
        fetch(file)
    for word in (file.url, SHA256, str(cache / "some" / "numbers"), "ORTHO_DATA"):
        assert word in str(caught.value)


@pytest.mark.parametrize("how", ["folder", "ORTHO_DATA"])
def test_a_local_folder_that_lacks_the_file_is_named(tmp_path, monkeypatch, cache, how):
    file = RemoteFile("some/numbers", "http://127.0.0.1:1/numbers", SHA256)
    monkeypatch.setenv("ORTHO_DATA", str(tmp_path if how == "ORTHO_DATA" else cache))
    with pytest.raises(FileNotFoundError, match=f"^{how}: expected some/numbers in .*{file.url} .sha256 {SHA256}"):
        fetch(file, tmp_path if how == "folder" else None)
