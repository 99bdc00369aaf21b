"""Text as people have it, and its tokens as nanoGPT has them."""

import dataclasses
import gzip
import hashlib
import importlib
import json

import numpy as np
import pytest
import tokenizers

from jgpt import BPETokenizer, CharTokenizer, DataConfig
from jgpt.data import corpus
from jgpt.data.corpus import read_text, text_chunks
from jgpt.data.dataset import load_dataset, prepare
from tests.data.files import write

RECORDS = [
    {"text": "one\r\n1"},
    {"text": ""},
    {"text": None},
    {"text": "two 🙂", "id": 7},
    {"text": "\ud83d\ude42"},
]
READ = "one\n1\ntwo 🙂\n🙂\n"


def gzipped(data):
    return gzip.compress(data, mtime=0)  # the same bytes in every worker: they name the tests


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def packed(data, suffix):
    if suffix == ".zst":
        return pytest.importorskip("backports.zstd").compress(data)
    if suffix == ".gz":
        return gzipped(data)
    return data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_and_json_lines_are_read_packed_or_not(tmp_path, suffix):
    def written(name, data):
        return write(tmp_path, f"{name}{suffix}", packed(data, suffix))

    byte_order_mark = b"\xef\xbb\xbf"
    documents = written("a.JSONL", byte_order_mark + lines(*RECORDS))
    page = written("a.md", b"# Title\n" * 9)
    bodies = written("b.jsonl", b'\n{"body": "x"}\n\n')

    said = []
    read = read_text([documents], warn=said.append)
    with_carriage_returns = read_text([documents], universal_newlines=False)
    separated = read_text([documents], separator="<|endoftext|>")
    assert read == READ
    (warning,) = said
    assert "carriage returns are read as newlines" in warning
    assert with_carriage_returns == READ.replace("\n1", "\r\n1")
    assert separated.count("<|endoftext|>") == 3  # neither null nor an empty text is a document

    assert read_text([page]) == "# Title\n" * 9
    assert "".join(text_chunks([bodies, bodies], field="body")) == "x\nx\n"


def test_a_column_of_parquet_is_read(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = ["a", None, "", "b\r\nc", "d"]
    category = arrow.dictionary(arrow.int8(), arrow.string())  # as pandas writes it

    for kind in (arrow.string(), arrow.large_string(), category):
        table = arrow.table({"n": range(5), "text": arrow.array(texts, kind)})
        parquet.write_table(table, path, row_group_size=2)
        assert read_text([str(path)]) == "a\nb\nc\nd\n"

    for field in ("body", "n"):  # n has numbers
        with pytest.raises(ValueError, match=f"has no column of text '{field}', but text: name"):
            read_text([str(path)], field=field)

    data = path.read_bytes()
    with_zeros = data[:4] + b"\0" * 400 + data[404:]
    for bad_data in (b"text", data[:-9], with_zeros):
        bad = write(tmp_path, "bad.parquet", bad_data)
        with pytest.raises(ValueError, match=r"bad\.parquet can't be read as Parquet: "):
            read_text([bad])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"\xef\xbb\xbf", "is empty"),
        ("a.txt", b"caf\xe9 au lait", "byte 3 can't be read"),
        ("a.txt", "to be".encode("utf-16"), "byte 0 can't be read; iconv -f ENCODING -t UTF-8"),
        ("a.pdf", b"%PDF-1.7\n%\xe2\xe3", "a.pdf is not UTF-8 text: byte 10 can't be read"),
        ("a.txt", "🙂".encode()[:3], "byte 0 can't be read"),
        ("a.txt", b"ab\xf0\x9f\x99", "byte 2 can't be read"),
        ("a.txt", "12345ü".encode() + b"\xff", "byte 7 can't be read"),
        ("a.txt", "\ufeffa\r\nb".encode() + b"\xff", "byte 7 can't be read"),
        ("a.txt", b"\xed\xa0\x80", "byte 0 can't be read"),
        ("a.jsonl", lines({"text": "a"}) + b'\n{"text": "b', "a.jsonl, line 3, can't be read as J"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "line 1, can't be read as JSON: 'utf-8'"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1, can't be read as JSON: 'utf-8'"),
        ("a.jsonl", lines({"text": "a"}, {"body": "b"}), "line 2, has no text in a field 'text'"),
        ("a.jsonl", lines({"text": 3}), "line 1, has no text in a field 'text': name the field"),
        ("a.jsonl", lines(["text"]), "line 1, has no text"),
        ("a.jsonl", lines("text"), "line 1, has no text"),
        ("a.jsonl", b'{"text": ""}\n', "a.jsonl is empty"),
        ("a.jsonl", lines({"text": None}), "a.jsonl is empty"),
        ("a.jsonl", b"null", "line 1, has no text"),
        ("a.txt.gz", gzipped(b"text" * 99)[:-9], "a.txt.gz is damaged or cut short: "),
        (
            "a.txt.gz",
            gzipped(b"text" * 99)[:-8] + b"12345678",
            "is damaged or cut short: CRC",
        ),
        ("a.txt.gz", b"text", "is damaged or cut short: Not a gzipped file"),
        ("a.txt.gz", gzipped(b"caf\xe9"), "a.txt.gz is not UTF-8 text: byte 3"),
        ("a.csv.gz", gzipped(b"a,b"), "a.csv.gz has no column of text 'text', but a, b: name"),
        ("a.csv", b"text\n", "a.csv is empty"),
        ("a.csv", b"a,text\n1\n", "a.csv is empty"),
        ("a.csv", b'text\n"x\ny', "a.csv, line 2, can't be read as CSV: unexpected end of data"),
        ("a.csv", b'"text\nx', "a.csv, line 1, can't be read as CSV: unexpected end of data"),
        ("a.csv", b"text\ncaf\xe9", "a.csv is not UTF-8 text: byte 8"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, name, data, message):
    path = write(tmp_path, name, data)
    for chunk_size in (1, 2, 3, 5, 1 << 20):
        with pytest.raises(ValueError, match=message) as error:
            list(text_chunks([path], chunk_size))
        assert path in str(error.value)
        assert "\n" not in str(error.value)


def test_the_column_of_a_table_is_its_documents(tmp_path):
    """Quotes, newlines and line separators stay inside a document, however the file is cut."""
    rows = 'id,text\r\n1,"one, ""1""\r\nmore"\r\n\r\n2,two\u2028lines\r\n3,\r\n4,long'
    table = write(tmp_path, "a.CSV", "\ufeff" + rows + "x" * 200_000)
    tabs = write(tmp_path, "b.tsv.gz", gzipped("\ufefftext\tid\nsome, words\t1\n".encode()))
    expected = 'one, "1"\nmore\ntwo\u2028lines\nlong' + "x" * 200_000 + "\n"

    assert read_text([table]) == expected
    assert read_text([tabs]) == "some, words\n"
    assert read_text([table], field="id") == "1\n2\n3\n4\n"


def test_a_table_in_a_folder_is_skipped_as_before(tmp_path):
    write(tmp_path, "folder/a.txt", "text")
    write(tmp_path, "folder/b.csv", "text\nnumbers")
    said = []

    assert read_text([str(tmp_path / "folder")], warn=said.append) == "text"
    assert "1 .csv" in said[0]


def test_zstandard_cut_short_is_named(tmp_path):
    zstd = pytest.importorskip("backports.zstd")
    data = zstd.compress(b"text" * 99)

    for bad_data in (data[:-3], b"text", data + b"text"):
        bad = write(tmp_path, "a.txt.zst", bad_data)
        with pytest.raises(ValueError, match=r"a\.txt\.zst is damaged or cut short: "):
            read_text([bad])


@pytest.mark.parametrize(
    ("name", "extra", "package"),
    [("a.txt.zst", "zstd", "backports.zstd"), ("a.parquet", "parquet", "pyarrow")],
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, name, extra, package):
    def missing(module):
        raise ModuleNotFoundError(module)

    path = write(tmp_path, name, b"x")
    monkeypatch.setattr(corpus.importlib, "import_module", missing)

    with pytest.raises(ModuleNotFoundError) as error:
        read_text([path])

    assert str(error.value) == f"{path} needs {package}: pip install 'jgpt[{extra}]'"


def test_a_folder_is_read_in_order_and_other_files_are_not(tmp_path):
    for name, data in {
        "a.md": "one ",
        "b.jsonl.gz": gzipped(lines({"text": "two"})),
        "c.txt": "three ",
        "d.py": "four ",
        "e.json": "{}",
        "f.rst.gz": gzipped(b"five"),
    }.items():
        write(tmp_path, name, data)
    write(tmp_path / "deep", "d.txt", "six ")
    write(tmp_path / "e.txt", "inner.txt", "seven")  # a folder with a text's name
    last = write(tmp_path, "z.text", "last")
    folder = str(tmp_path)
    said = []

    read = read_text([folder, last, last], warn=said.append)

    assert read == "one two\nthree four six sevenfivelastlastlast"
    assert said == [f"{folder}: 8 files are read, and 1 .json skipped"]

    # a folder of code is read as its files are
    code = write(tmp_path / "code", "a.PY", "x = 1\n")
    write(tmp_path / "code", "__init__.py", "")
    assert read_text([str(tmp_path / "code")]) == read_text([code])


def test_hidden_files_are_skipped_and_what_is_skipped_is_said(tmp_path):
    """Jupyter's copies, say: the text of the validation split would be in the training split."""
    for folder, name in (
        ("", "notes.md"),
        (".ipynb_checkpoints", "notes-checkpoint.md"),
        (".git", "message.txt"),
        ("deep", ".draft.txt"),
    ):
        write(tmp_path / "text" / folder, name, name)
    for number in range(3):
        write(tmp_path / "text", f"{number}.png", b"\x89PNG")
    write(tmp_path / "text", "Makefile", "all:")
    write(tmp_path / "pictures", "a.png", b"\x89PNG")
    folder = str(tmp_path / "text")
    hidden = str(tmp_path / "text" / ".git")
    pictures = str(tmp_path / "pictures")
    said = []

    read = read_text([folder], warn=said.append)

    assert read == "notes.md"
    assert said == [f"{folder}: 1 files are read, and 3 hidden, 3 .png, 1 without a suffix skipped"]
    # but what is named is read
    assert read_text([hidden]) == "message.txt"
    assert read_text([f"{hidden}/message.txt"]) == "message.txt"
    with pytest.raises(FileNotFoundError, match=r"without any text or code .*: it has 1 \.png$"):
        read_text([pictures])


def test_bytes_that_are_read_are_counted(tmp_path):
    data = gzipped(b"text" * 999)
    path = write(tmp_path, "a.txt.gz", data)
    counts = []

    read_text([path, path], advance=counts.append)

    assert sum(counts) == 2 * len(data)  # as they lie on the disk, packed


def test_the_end_of_text_separates_documents_where_there_is_one(tmp_path, data_directory):
    path = write(tmp_path, "a.jsonl", lines({"text": "To be"}, {"text": "or not"}) * 9)
    prepared = tmp_path / "prepared"
    config = DataConfig(
        (path,),
        tokenizer="gpt2",
        tokenizer_files=str(data_directory / "gpt2-bpe"),
    )
    of_characters = dataclasses.replace(config, tokenizer="char")
    of_prepared = DataConfig((str(prepared),))

    dataset = load_dataset(config, 1)
    count = prepare(config, prepared)
    mapped = load_dataset(of_prepared, 1)
    characters = load_dataset(of_characters, 1)

    tokens = [2514, 307, 50256, 273, 407, 50256]
    assert [*dataset.train, *dataset.validation] == tokens * 9
    assert dataset.tokenizer.decode(tokens) == "To be<|endoftext|>or not<|endoftext|>"
    assert count == len(tokens) * 9
    assert mapped.text.tokens_digest == dataset.text.tokens_digest
    # a newline where the tokenizer has no end of text
    assert characters.tokenizer.decode(characters.train[:13]) == "To be\nor not\n"


def test_the_end_of_text_may_be_token_0(tmp_path):
    """As it is SmolLM2's."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    end = "<|endoftext|>"
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=[end], initial_alphabet=[*"Tobent"])
    backend.train_from_iterator([], trainer)
    tokenizer = BPETokenizer(backend)
    assert tokenizer.end_of_text == 0
    path = write(tmp_path, "a.jsonl", lines({"text": "Tobe"}, {"text": "not"}) * 9)

    dataset = load_dataset(DataConfig((path,)), 1, tokenizer=tokenizer)

    assert tokenizer.decode(dataset.train[:9]) == "Tobe<|endoftext|>not<|endoftext|>"


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


def tokens_digest_of(tokens):
    return hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()


# --- nanoGPT's tokens ----------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path):
    """What nanoGPT's prepare.py writes, and the tokenizer."""
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(40, 60, dtype=np.uint16).tofile(tmp_path / "val.bin")
    tokenizer = CharTokenizer(characters(60))
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    return tmp_path


def characters(count, first=0):
    return "".join(chr(code) for code in range(first, first + count))


def test_nanogpt_s_tokens_are_its_own_splits(tokens):
    config = DataConfig((str(tokens),))

    dataset = load_dataset(config, 8)

    assert isinstance(dataset.train, np.memmap)
    assert dataset.train.tolist() == list(range(40))
    assert dataset.validation.tolist() == list(range(40, 60))
    assert len(dataset.test) == 0
    assert dataset.tokenizer.vocab_size == 60

    # a single file is split as a text is
    np.arange(60, dtype=np.uint16).tofile(tokens / "whole.bin")
    single_config = DataConfig((str(tokens / "whole.bin"),), test_fraction=0.1)
    single = load_dataset(single_config, 2)
    assert len(single.train) == 48
    assert len(single.validation) == 6
    assert len(single.test) == 6
    assert single.text.tokens_digest == dataset.text.tokens_digest

    # a tokenizer that is given takes precedence over the folder's
    larger = CharTokenizer(characters(61))
    again = load_dataset(config, 8, tokenizer=larger, known=dataset.text)
    assert again.tokenizer.vocab_size == 61


def test_a_run_of_the_text_beside_them_stays_one(tokens):
    text = write(tokens, "input.txt", "abc" * 9)
    old = load_dataset(DataConfig((text,)), 1)
    config = DataConfig((str(tokens),))

    again = load_dataset(config, 1, tokenizer=old.tokenizer, known=old.text)

    assert again.text == old.text


def test_nanogpt_s_tokens_are_gpt_2_s_where_the_config_says_so(tokens, data_directory):
    files = str(data_directory / "gpt2-bpe")
    config = DataConfig((str(tokens),), tokenizer="gpt2", tokenizer_files=files)

    dataset = load_dataset(config, 8)

    assert isinstance(dataset.tokenizer, BPETokenizer)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda it: (it / "val.bin").write_bytes(b"\0" * 41),
            "not a multiple of the data-type size",
        ),
        (
            lambda it: (it / "val.bin").write_bytes(b""),
            "empty file",
        ),
        (
            lambda it: np.arange(40, dtype=np.uint32).tofile(it / "val.bin"),
            "val.bin seems to have uint32 tokens, because every other uint16 in it is 0: write ",
        ),
        (
            lambda it: llm_c_shard(it / "train.bin", range(40)),
            r"train.bin contains token 55432, outside its tokenizer's vocabulary of 60",
        ),
        (lambda it: (it / "val.bin").unlink(), "val.bin"),
        (
            lambda it: (it / "train.bin").write_bytes(b"\x3c\0" * 40),
            "train.bin contains token 60, outside its tokenizer's vocabulary of 60",
        ),
        (
            lambda it: (it / "tokenizer.json").unlink(),
            "has tokens without a tokenizer: put its tok",
        ),
        (lambda it: (it / "tokenizer.json").write_text("{}"), "tokenizer.json: not a tokenizer"),
    ],
)
def test_damaged_tokens_are_rejected(tokens, damage, message):
    damage(tokens)
    with pytest.raises((ValueError, OSError), match=message):
        load_dataset(DataConfig((str(tokens),)), 8)


def llm_c_shard(path, tokens):
    header = np.zeros(256, np.int32)
    header[0] = 20240520  # the magic number
    header[1] = 1  # the version
    header[2] = len(tokens)
    numbers = np.array(tokens, np.uint16)
    path.write_bytes(header.tobytes() + numbers.tobytes())


def test_the_width_of_tokens_is_that_of_their_vocabulary(tmp_path):
    """uint32 for a vocabulary of more than 65,536, which uint16 can't count."""
    for size, dtype, wrong_dtype in (
        (65_536, np.uint16, np.uint32),
        (65_537, np.uint32, np.uint16),
    ):
        folder = tmp_path / str(size)
        folder.mkdir()
        config = DataConfig((str(folder),))
        tokenizer = CharTokenizer(characters(size, first=0x10000))
        (folder / "tokenizer.json").write_text(tokenizer.to_json())
        written = np.arange(size - 40, size)
        for name in ("train.bin", "val.bin"):
            written.astype(dtype).tofile(folder / name)

        dataset = load_dataset(config, 8)
        assert dataset.train.tolist() == written.tolist()

        written.astype(wrong_dtype).tofile(folder / "val.bin")
        with pytest.raises(
            ValueError, match=r"seems to have uint32 tokens|outside its tokenizer's vocabulary"
        ):
            load_dataset(config, 8)


def test_tokens_go_with_nothing_else(tokens):
    file = str(tokens / "train.bin")
    split_again = DataConfig((str(tokens),), test_fraction=0.1)
    mixed = DataConfig((file, "pydocs"))

    with pytest.raises(ValueError, match="the test split has 0 tokens"):
        load_dataset(split_again, 8)
    with pytest.raises(ValueError, match="can't be joined with other data"):
        load_dataset(mixed, 8)
