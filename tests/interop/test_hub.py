"""Models of the hub by name, from a server on this machine that speaks the hub's protocol."""

import errno
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

import jgpt
from jgpt.interop.hub import HUB, find_model
from tests.commands import typist
from tests.interop.test_huggingface import assert_same_weights, in_two_shards
from tests.models import random_gpt

SHA = "0123456789abcdef0123456789abcdef01234567"
LATER = "89abcdef0123456789abcdef0123456789abcdef"
"""The commit of `me/moving` after its config has been read once."""
CODE = b"raise SystemExit('this is never read')"


def changed(weights: bytes) -> bytes:
    """Weights of the same shapes."""
    return save({name: np.zeros_like(array) for name, array in load(weights).items()})


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """Files by repository and name; of a commit other than SHA with its name."""
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    tokenizer = jgpt.BPETokenizer.train(["abcdefghijklmnop\n" * 40], 263)
    jgpt.save_hf(random_gpt("gpt2", vocab_size=263), folder, tokenizer=tokenizer)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = files["model.safetensors"]
    without_weights = dict(files)
    del without_weights["model.safetensors"]
    dangerous = {"modeling.py": CODE, "pytorch_model.bin": CODE, "model-extra.pkl": CODE}
    config = json.loads(files["config.json"])
    config_with_code = json.dumps(config | {"auto_map": {"AutoModel": "modeling.GPT"}})
    return {
        "me/moving": files,
        f"me/moving@{LATER}": files | {"model.safetensors": changed(weights)},
        "me/sharded": without_weights | in_two_shards(weights),
        "me/tiny": files | dangerous,
        HUB["smollm2"]: files,
        "me/pickles": without_weights | dangerous,
        "me/code": files | dangerous | {"config.json": config_with_code.encode()},
        "me/tokens": files | {"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": "x"}}'},
        "me/broken": files | {"config.json": b"{"},
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
            name = "/".join(parts[:2])
            rest = parts[2:]
            if name not in repositories:
                return self.answer(b"", 401 if name != "me/gated" else 403)
            revision = rest[1] if len(rest) > 1 else "main"
            if revision == "main":
                moved = name == "me/moving" and any("/moving/resolve/" in path for path in asked)
                revision = LATER if moved else SHA
            self.commit = revision
            files = repositories[name if revision == SHA else f"{name}@{revision}"]
            if rest[:1] == ["tree"]:
                listed = [
                    {"type": "file", "path": file, "size": len(data), "oid": digest(data)}
                    for file, data in files.items()
                ]
                return self.answer(json.dumps(listed).encode())
            if rest[:1] == ["resolve"]:
                return self.answer(files[rest[-1]])
            siblings = [{"rfilename": file} for file in files]
            self.answer(json.dumps({"id": name, "sha": revision, "siblings": siblings}).encode())

        do_HEAD = do_GET
        commit = SHA

        def answer(self, data: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("X-Repo-Commit", self.commit)
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
    "hub:me/pickles": "me/pickles has no model.safetensors: other formats can run code",
    "hub:me/code": "me/code needs code of its own, by auto_map in config.json",
    "hub:me/tokens": "me/tokens needs code of its own, by auto_map in tokenizer_config.json",
    "hub:me/broken": "me/broken/config.json: Expecting property name",
    "hub:me/nobody": "the hub has no public model me/nobody",
    "hub:me/gated": "me/gated is gated: accept its terms at https://huggingface.co/me/gated",
    "hub:tiny": "hub:tiny must be hub:OWNER/NAME",
    "gpt2": "gpt2/config.json: No such file or directory",
}


@pytest.mark.slow
def test_models_are_fetched_by_name_and_code_never_is(hub, repositories, tmp_path):
    address, asked, end = hub
    (tmp_path / "gpt2").mkdir()
    where = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": address, "NO_PROXY": "127.0.0.1"}
    with typist(tmp_path, **where) as type_in:

        def fetch(model: str, out: str) -> None:
            ready = f"2 layers, 21 features, vocabulary 263; next: jgpt sample {out}\n"
            assert type_in("import", model, "--out", out) == (0, ready, "")

        def refuse(model: str, why: str) -> None:
            refused = type_in("import", model, "--out", "x")
            assert (refused.code, refused.stdout) == (2, "")
            assert refused.stderr.startswith(f"jgpt: {why}")
            assert refused.stderr.count("\n") == 1

        fetch("hub:me/tiny", "tiny")
        fetch("smollm2", "smollm2")
        fetch("hub:me/moving", "moving")
        fetch("hub:me/sharded", "sharded")
        for model, why in REFUSED.items():
            refuse(model, why)
        end()
        fetch("hub:me/tiny", "again")
        refuse("qwen3", "Qwen/Qwen3-0.6B can't be fetched (LocalEntryNotFoundError: ")

    assert not (tmp_path / "x").exists()
    models_with_weights = set()
    for path in asked:
        if "/resolve/" in path:
            assert not path.endswith((".py", ".bin", ".pkl"))
            if path.endswith(".safetensors"):
                models_with_weights.add(path.split("/")[2])
    assert models_with_weights == {"tiny", "SmolLM2-135M", "moving", "sharded"}

    # what was fetched is what is loaded from the same files in a folder: shards come with their
    # index, and weights are of the commit of the config, not of a later one
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "gpt2" / name).write_bytes(repositories["me/tiny"][name])
    expected = jgpt.load_hf(tmp_path / "gpt2")
    for name in ("again", "moving", "sharded"):
        model, tokenizer, _ = jgpt.load(tmp_path / name)
        assert_same_weights(model, expected)
        assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_a_full_disk_is_no_lack_of_a_network(monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(OSError, match=r"a/b can't be fetched .*\[Errno 28\] No space left"):
        find_model("hub:a/b")


def test_a_folder_goes_before_a_short_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    assert find_model("qwen3") == Path("qwen3")
