"""Text is found, downloaded whole or not at all, and read strictly."""

import io
import re
import shutil
import socket
import threading
from contextlib import contextmanager, nullcontext
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgpt import BPETokenizer
from jgpt.data import sources
from jgpt.data.sources import read_stream, shakespeare_file
from tests.data.files import chunks_of, read_text, write


def test_tiny_shakespeare_is_found_in_the_data_directory(
    data_directory, user_cache, monkeypatch, tmp_path
):
    assert shakespeare_file() == data_directory / "tinyshakespeare.txt"
    text = read_text(["shakespeare"])
    assert len(text) == 1_115_394
    assert text.startswith("First Citizen:\nBefore we proceed")
    assert not list(user_cache.iterdir())
    # a wrong copy is named and kept
    copy = write(tmp_path, "tinyshakespeare.txt", "Thou art not he.")
    monkeypatch.setenv("JGPT_DATA_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="is not tiny Shakespeare") as error:
        shakespeare_file()
    assert copy in str(error.value)
    assert (tmp_path / "tinyshakespeare.txt").read_text() == "Thou art not he."


@pytest.mark.parametrize(
    ("name", "hint"), [("missing.txt", ""), ("shakespear", " (did you mean 'shakespeare'?)")]
)
def test_a_name_that_is_neither_a_file_nor_a_corpus_is_rejected(name, hint, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    corpora = "the corpora are pydocs and shakespeare"
    message = f"'{name}' is neither a file nor a corpus{hint}: {corpora}"

    with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
        read_text([name])


@contextmanager
def server(answer):
    """A web server on this machine that answers one request with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)

        def serve():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 " + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/input.txt"
        thread.join()


@pytest.fixture
def offline(monkeypatch):
    """Only this machine's own servers can be reached, and no data directory is given."""
    monkeypatch.delenv("JGPT_DATA_DIR", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(sources, "SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")


def test_tiny_shakespeare_is_downloaded_once(shakespeare, user_cache, offline, monkeypatch):
    data = shakespeare.encode()
    said = []
    with server(b"200 OK\r\n\r\n" + data) as url:
        monkeypatch.setattr(sources, "SHAKESPEARE_URL", url)
        assert read_text(["shakespeare"], said.append) == shakespeare
    assert said == [f"downloading tiny Shakespeare from {url}"]
    path = shakespeare_file()  # the server is gone
    assert path == user_cache / "tinyshakespeare.txt"
    assert list(user_cache.iterdir()) == [path]
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"200 OK\r\n\r\nTo be or not to be", "SHA-256 "),
        (
            b"200 OK\r\nContent-Length: 1115394\r\n\r\nTo be or",
            "IncompleteRead(8 bytes read, 1115386 more expected)",
        ),
        (b"404 Not Found\r\n\r\ngone", "404"),
        (b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nshort", "IncompleteRead"),
        (None, "refused"),
    ],
    ids=["wrong", "cut", "missing", "cut chunk", "no network"],
)
def test_a_failed_download_leaves_nothing_and_says_both_ways_out(
    user_cache, offline, monkeypatch, answer, reason
):
    with server(answer) if answer else nullcontext(sources.SHAKESPEARE_URL) as url:
        monkeypatch.setattr(sources, "SHAKESPEARE_URL", url)
        with pytest.raises(ConnectionError, match="could not be downloaded") as error:
            read_text(["shakespeare"])
    for word in (reason, url, "name a file", "the corpus pydocs", "JGPT_DATA_DIR"):
        assert word in str(error.value)
    assert not list(user_cache.iterdir())


def test_newlines_are_universal_and_a_byte_order_mark_is_dropped(tmp_path):
    written = {
        "plain": "d\ufeff\ne",  # a mark within a text is a character
        "windows": "\ufeffa\r\nb\r\n",
        "mac": "c\rd\r",
        "marked": "\ufeffe",
    }
    files = [write(tmp_path, name, text) for name, text in written.items()]
    assert read_text(files) == "d\ufeff\nea\nb\nc\nd\ne"
    # and so in a stream
    data = written["windows"].encode()
    assert read_stream(io.BytesIO(data), "it") == "a\nb\n"
    assert read_stream(io.BytesIO(b""), "it") == ""
    with pytest.raises(ValueError, match="it is not UTF-8 text: byte 3 can't be read"):
        read_stream(io.BytesIO(b"caf\xe9"), "it")


def test_what_runs_in_a_folder_have_written_is_not_its_text(trained, tmp_path):
    """Their samples, say; but a folder with some of a run's names is none."""
    with pytest.raises(FileNotFoundError, match=r"is a folder without any text or code \("):
        read_text([str(tmp_path)])
    write(tmp_path, "notes.txt", "mine ")
    write(tmp_path / "data", "config.json", "{}")
    write(tmp_path / "data", "tokenizer.json", "{}")
    write(tmp_path / "data", "text.txt", "too")
    run = shutil.copytree(trained.path, tmp_path / "runs" / "run")
    write(run / "wandb", "log.txt", "words")
    assert (run / "samples.txt").read_text()
    assert read_text([str(tmp_path)]) == "toomine "
    with pytest.raises(
        FileNotFoundError, match=r"folder without any text or code .*: it has \d+ of runs"
    ):
        read_text([str(tmp_path / "runs")])
    sample = (run / "samples.txt").read_text()
    assert read_text([str(run / "samples.txt")]) == sample  # which is asked for


LINES = st.text(alphabet="a🙂é' \n\r\t1.\u2028\x1c\x85", max_size=60)


@pytest.fixture(scope="module")
def byte_pairs():
    return BPETokenizer.train(["a a' 's aa a. .. 11\n\n a\t\t a🙂 \n \n  a\n"] * 9, 300)


@given(text=LINES.filter(bool), chunk_size=st.integers(1, 9))
def test_chunks_join_to_the_whole_and_byte_pairs_do_not_see_the_seams(
    byte_pairs, tmp_path_factory, text, chunk_size
):
    path = write(tmp_path_factory.getbasetemp(), "chunked.txt", text)
    read = text.replace("\r\n", "\n").replace("\r", "\n")

    chunks = list(chunks_of([path, path], chunk_size))

    assert "".join(chunks) == read + read
    assert all(chunks)
    pieces = [byte_pairs.encode(chunk).tolist() for chunk in chunks_of([path], chunk_size)]
    assert list(chain.from_iterable(pieces)) == byte_pairs.encode(read).tolist()
