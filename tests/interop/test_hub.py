"""Models of the hub by name, from a server on this machine that speaks the hub's protocol."""

import errno
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import jgpt
from jgpt.interop.hub import HUB, find_model
from tests.commands import typist
from tests.models import random_gpt

SHA = "0123456789abcdef0123456789abcdef01234567"
CODE = b"raise SystemExit('this is never read')"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """Files by repository and name."""
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    tokenizer = jgpt.BPETokenizer.train(["abcdefghijklmnop\n" * 40], 263)
    jgpt.save_gpt2(random_gpt("gpt2", vocab_size=263), folder, tokenizer=tokenizer)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    dangerous = {"modeling.py": CODE, "pytorch_model.bin": CODE, "model-extra.pkl": CODE}
    names_code = json.loads(files["config.json"]) | {"auto_map": {"AutoModel": "modeling.GPT"}}
    weightless = {name: data for name, data in files.items() if name != "model.safetensors"}
    return {
        "me/tiny": files | dangerous,
        HUB["smollm2"]: files,
        "me/pickles": weightless | dangerous,
        "me/code": files | dangerous | {"config.json": json.dumps(names_code).encode()},
        "me/tokens": files | {"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": "x"}}'},
        "me/broken": files | {"config.json": b"{"},
        "me/list": files | {"tokenizer_config.json": b"[]"},
    }


@pytest.fixture
def hub(repositories):
    """The server's address, the paths of what was asked of it, and what ends it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            parts = path.removeprefix("/api/models").strip("/").split("/")
            name, rest = "/".join(parts[:2]), parts[2:]
            if (files := repositories.get(name)) is None:
                return self.answer(b"", 401 if name != "me/gated" else 403, name)
            if rest[:1] == ["tree"]:
                listed = [
                    {"type": "file", "path": file, "size": len(data), "oid": digest(data)}
                    for file, data in files.items()
                ]
                return self.answer(json.dumps(listed).encode())
            if rest[:1] == ["resolve"]:
                return self.answer(files[rest[-1]])
            siblings = [{"rfilename": file} for file in files]
            self.answer(json.dumps({"id": name, "sha": SHA, "siblings": siblings}).encode())

        do_HEAD = do_GET

        def answer(self, data: bytes, status: int = 200, name: str = "") -> None:
            self.send_response(status)
            self.send_header("X-Repo-Commit", SHA)
            self.send_header("ETag", f'"{digest(data)}"')
            self.send_header("Content-Length", str(len(data)))
            if status != 200:
                self.send_header("X-Error-Code", "GatedRepo" if status == 403 else "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    def end() -> None:
        server.shutdown()
        server.server_close()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked, end
    end()
    thread.join()


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


REFUSED = {
    "hub:me/pickles": "me/pickles has no model.safetensors: other formats can run code when they "
    "are read, and are never fetched",
    "hub:me/code": "me/code needs code of its own, by auto_map in config.json: code is never "
    "fetched or run",
    "hub:me/tokens": "me/tokens needs code of its own, by auto_map in tokenizer_config.json: code "
    "is never fetched or run",
    "hub:me/broken": "me/broken/config.json: Expecting property name enclosed in double quotes: "
    "line 1 column 2 (char 1)",
    "hub:me/list": "me/list/tokenizer_config.json: not an object, but list",
    "hub:me/nobody": "the hub has no public model me/nobody",
    "hub:me/gated": "me/gated is gated: accept its terms at https://huggingface.co/me/gated, then "
    "run: hf auth login",
    "hub:tiny": "hub:tiny must be hub:OWNER/NAME",
    "gpt2": "gpt2/config.json is missing",
}
OFFLINE = (
    "Qwen/Qwen3-0.6B can't be fetched (LocalEntryNotFoundError). Without a network, copy "
    "config.json, model.safetensors and tokenizer.json from another machine into a folder, and "
    "give the folder"
)


def test_models_are_fetched_by_name_and_code_never_is(hub, repositories, tmp_path):
    address, asked, end = hub
    (tmp_path / "gpt2").mkdir()
    where = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": address, "NO_PROXY": "127.0.0.1"}
    with typist(tmp_path, **where) as type_in:

        def fetch(model: str, out: str) -> None:
            ready = f"2 layers, 21 features, vocabulary 263; next: jgpt sample {out}\n"
            assert type_in("import", model, "--out", out) == (0, ready, "")

        def refuse(model: str, why: str) -> None:
            assert type_in("import", model, "--out", "x") == (2, "", f"jgpt: {why}\n")

        fetch("hub:me/tiny", "tiny")
        fetch("smollm2", "smollm2")
        for model, why in REFUSED.items():
            refuse(model, why)
        end()
        fetch("hub:me/tiny", "again")
        refuse("qwen3", OFFLINE)
    assert not (tmp_path / "x").exists()
    files = [path for path in asked if "/resolve/" in path]
    assert [path for path in files if path.endswith((".py", ".bin", ".pkl"))] == []
    weights = {path.split("/")[2] for path in files if path.endswith(".safetensors")}
    assert weights == {"tiny", "SmolLM2-135M"}
    model, tokenizer, _ = jgpt.load(tmp_path / "again")
    assert isinstance(model, jgpt.GPT)
    shared = repositories["me/tiny"]
    (tmp_path / "model.safetensors").write_bytes(shared["model.safetensors"])
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "gpt2")
    (tmp_path / "gpt2" / "config.json").write_bytes(shared["config.json"])
    same = jgpt.load_hf(tmp_path / "gpt2")
    assert (model.token_embedding.embedding[...] == same.token_embedding.embedding[...]).all()
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_a_full_disk_is_no_lack_of_a_network(monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(OSError, match=r"a/b can't be stored: \[Errno 28\] No space left"):
        find_model("hub:a/b")


def test_a_folder_goes_before_a_short_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    assert find_model("qwen3") == Path("qwen3")
