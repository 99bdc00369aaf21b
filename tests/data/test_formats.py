"""Text as people have it, and its tokens as nanoGPT has them."""

import dataclasses
import gzip
import importlib
import json

import pytest

from jgpt import DataConfig
from jgpt.data.dataset import load_dataset
from jgpt.data.prepared import prepare
from tests.data.files import chunks_of, read_text, write

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


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_text_and_json_lines_are_read_packed_or_not(tmp_path, suffix):
    def written(name, data):
        return write(tmp_path, f"{name}{suffix}", gzipped(data) if suffix else data)

    byte_order_mark = b"\xef\xbb\xbf"
    documents = written("a.JSONL", byte_order_mark + lines(*RECORDS))
    page = written("a.md", b"# Title\n" * 9)
    bodies = written("b.jsonl", b'\n{"body": "x"}\n\n')

    separated = read_text([documents], separator="<|endoftext|>")
    assert read_text([documents]) == READ
    assert separated.count("<|endoftext|>") == 3  # neither null nor an empty text is a document

    assert read_text([page]) == "# Title\n" * 9
    assert read_text([bodies, bodies], field="body") == "x\nx\n"


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

    with pytest.raises(ValueError, match="has no column 'body', but n, text: name it with"):
        read_text([str(path)], field="body")
    with pytest.raises(ValueError, match="has no text in the column 'n': name another one"):
        read_text([str(path)], field="n")

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
        ("a.txt", b"caf\xe9 au lait", "byte 3 can't be read"),
        ("a.txt", "to be".encode("utf-16"), "byte 0 can't be read; iconv -f ENCODING -t UTF-8"),
        ("a.jsonl", lines({"text": "a"}) + b'\n{"text": "b', "a.jsonl, line 3, can't be read as J"),
        ("a.jsonl", lines({"text": "a"}, {"body": "b"}), "line 2, has no text in a field 'text'"),
        ("a.jsonl", lines({"text": None}), "a.jsonl is empty"),
        ("a.txt.gz", gzipped(b"text" * 99)[:-9], "a.txt.gz is damaged or cut short: "),
        ("a.txt.gz", gzipped(b"text" * 99)[:-8] + b"12345678", "is damaged or cut short: CRC"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, name, data, message):
    path = write(tmp_path, name, data)
    for chunk_size in (1, 2, 3, 5, 1 << 20):
        with pytest.raises(ValueError, match=message) as error:
            list(chunks_of([path], chunk_size))
        assert path in str(error.value)
        assert "\n" not in str(error.value)


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

    read = read_text([folder, last, last], said.append)

    assert read == "one two\nthree four six sevenfivelastlastlast"
    assert said == [f"{folder}: 8 files are read, and 1 .json skipped"]

    # a folder of code is read as its files are
    code = write(tmp_path / "code", "a.PY", "x = 1\n")
    write(tmp_path / "code", "__init__.py", "")
    assert read_text([str(tmp_path / "code")]) == read_text([code])


@pytest.mark.slow
def test_the_end_of_text_separates_documents_where_there_is_one(tmp_path, data_directory):
    path = write(tmp_path, "a.jsonl", lines({"text": "To be"}, {"text": "or not"}) * 9)
    prepared = tmp_path / "prepared"
    config = DataConfig((path,), tokenizer="gpt2", tokenizer_files=str(data_directory / "gpt2-bpe"))
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
    assert mapped.digest == dataset.digest
    # a newline where the tokenizer has no end of text
    assert characters.tokenizer.decode(characters.train[:13]) == "To be\nor not\n"
