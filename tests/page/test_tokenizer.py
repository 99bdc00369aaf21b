"""The page's tokenizer in JavaScript gives the tokens that Python gives, for any text."""
# ruff: noqa: RUF001

import functools
import json
import random
import shutil
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers as tk

import jgpt
from jgpt import BPETokenizer, ByteTokenizer, CharTokenizer
from jgpt.data.characters import NumberTokenizer
from jgpt.data.encode import Tokenizer
from jgpt.page.program import Uncomputable
from jgpt.page.vocabulary import Untranslatable, translate, vocabulary_of
from tests.data.test_special_tokens import llama2, with_template

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="there is no node to run the script in")
SCRIPT = Path(jgpt.__file__).parent / "page" / "browser" / "tokenizer.js"
DRIVER = """
const read = JSON.parse(require("fs").readFileSync(0, "utf8"));
const tried = act => {
  try { return act(); } catch (error) { return error.message; }
};
const answers = read.map(({ vocabulary, texts, ids, single }) => {
  const tokenizer = makeTokenizer(vocabulary);
  return {
    encoded: texts.map(text => tried(() => tokenizer.encode(text))),
    decoded: ids.map(list => tried(() => tokenizer.decode(list))),
    single: single.map(token => tokenizer.textOf(token)),
    size: tokenizer.size,
  };
});
console.log(JSON.stringify(answers));
"""


def in_node(*asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What the script answers, for one tokenizer after another, in one process."""
    assert NODE is not None
    full = [{"texts": [], "ids": [], "single": []} | each for each in asked]
    done = subprocess.run(
        [NODE, "-e", SCRIPT.read_text(encoding="utf-8") + DRIVER],
        input=json.dumps(full),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- tokenizers -----------------------------------------------------------------------------------

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
LEARNT = [
    Path(json.__file__).read_text(encoding="utf-8"),
    "don't WE'LL they're 'Sunday  1234567 12,5 ½ ²\r\n\r\n\t\t   \n\n caf\u00e9 stra\u00dfe",
    "Привет мир, как дела? 你好世界 こんにちは שלום עולם مرحبا بالعالم हिन्दी 🙂🙂👨‍👩‍👧 é é",
] * 2


def byte_level(pre_tokenizer: Any, vocab_size: int, special: list[str], normalizer: Any = None):
    backend = tk.Tokenizer(tk.models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(LEARNT, trainer)
    return backend


def split_into(words: str, *more: Any) -> Any:
    split = tk.pre_tokenizers.Split(tk.Regex(words), "isolated")
    bytes_only = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tk.pre_tokenizers.Sequence([split, *more, bytes_only])


def llama3() -> BPETokenizer:
    """Whole words before merges, and a token that begins a text."""
    special = ["<|begin_of_text|>", "<|eot_id|>"]
    backend = byte_level(split_into(LLAMA3_WORDS), 900, special)
    values = json.loads(with_template(backend, begin="<|begin_of_text|>").to_str())
    # Words that no merges make, as in Llama 3.
    values["model"]["ignore_merges"] = True
    values["model"]["vocab"] |= {"Ġdecode": 900, "xyzzy": 901}
    return BPETokenizer.from_hf(values)


def qwen() -> BPETokenizer:
    """The normal form C, digits one by one, and rows of the embedding without a text."""
    normalizer = tk.normalizers.NFC()
    backend = byte_level(split_into(QWEN_WORDS), 800, ["<|im_start|>", "<|im_end|>"], normalizer)
    return BPETokenizer(backend, vocab_size=850)


def smollm() -> BPETokenizer:
    digits = tk.pre_tokenizers.Digits(individual_digits=True)
    words = tk.pre_tokenizers.ByteLevel(add_prefix_space=True)
    parts = tk.pre_tokenizers.Sequence([digits, words])
    return BPETokenizer(byte_level(parts, 700, ["<|endoftext|>"]))


def with_added() -> BPETokenizer:
    """Added tokens of all kinds, one of which is a letter of the byte-level alphabet."""
    normalizer = tk.normalizers.Sequence([tk.normalizers.NFKC(), tk.normalizers.NFD()])
    backend = byte_level(split_into(LLAMA3_WORDS), 600, ["<|a|>"], normalizer)
    backend.add_tokens(
        [
            tk.AddedToken("<left>", lstrip=True, normalized=False),
            tk.AddedToken("<right>", rstrip=True, normalized=False),
            tk.AddedToken("<both>", lstrip=True, rstrip=True, normalized=True),
            tk.AddedToken("word", single_word=True, normalized=False),
            tk.AddedToken("caf\u00e9", normalized=True),
            tk.AddedToken("ﬁ", normalized=True),
            tk.AddedToken("\u00e9", normalized=False),
            tk.AddedToken("<|", normalized=False),
            tk.AddedToken(" two words ", normalized=True),
        ]
    )
    return BPETokenizer(backend)


@functools.cache
def gpt2(directory: Path) -> BPETokenizer:
    return BPETokenizer.from_gpt2(directory / "gpt2-bpe")


OUT_OF_ORDER = "fg f,f g,ab c,a b,b c,abc d,a bc,d d,dd d"


def out_of_order() -> BPETokenizer:
    """Merges before those that make their parts, and bytes that have no token."""
    vocabulary = {letter: token for token, letter in enumerate("Ġabcdefg")}
    vocabulary |= {"abc": 8, "ab": 10, "bc": 11, "abcd": 13, "dd": 14, "ddd": 15}
    vocabulary |= {"fg": 16, "fgf": 17}
    merges = [tuple(pair.split()) for pair in OUT_OF_ORDER.split(",")]
    model = tk.models.BPE(vocab=vocabulary, merges=merges)
    backend = tk.Tokenizer(model)
    backend.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tk.decoders.ByteLevel()
    return BPETokenizer(backend)


CHARACTERS = CharTokenizer.from_text("".join(LEARNT) + "\ud800\0\x85\ufeff")
TRAINED: dict[str, Callable[[], Tokenizer]] = {
    "characters": lambda: CHARACTERS,
    "bytes": ByteTokenizer,
    "trained": lambda: BPETokenizer.train(LEARNT, 600),
    "llama3": llama3,
    "qwen": qwen,
    "smollm": smollm,
    "with_added": with_added,
    "out_of_order": out_of_order,
}


@pytest.fixture(scope="module")
def every_tokenizer(data_directory) -> dict[str, Tokenizer]:
    made = {name: make() for name, make in TRAINED.items()}
    made["gpt2"] = gpt2(data_directory)
    return made


# --- texts ----------------------------------------------------------------------------------------

CONTRACTIONS = "'s 'S 'ſ 'T 'll 'LL 'lL 're 'Ve 'd ' '' ’s 'x ſ K st ﬆ ß ẞ ss"
SCRIPTS = "Привет 你好 世界 🙂 👨‍👩‍👧 👍🏽 🇩🇪 ❤\ufe0f \u0301 \u200d \u200f"
PIECES = [
    *CONTRACTIONS.split(),
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n \n", "\xa0", "\u2028", "\x85", "\x1c"),
    *("\u200b", "\ufeff", "\u3000", "\u180e", "\x0b\x0c", "\0", "\ufffd", "\U0010ffff"),
    *("1", "12", "1234567", "½", "²", "٣", "Ⅷ", "一", "𝟘", "1,234.5"),
    *("a", "word", "words", "Word", "The", "decode", "xyzzy", "def", "self", "import", "return"),
    *("abcd", "abc", "ddd", "dddd", "aab", "e\u0301", "\u00e9", "caf\u00e9", "cafe\u0301"),
    *("ﬁ", "Å", "\u1e9b\u0323", "한국어", "\u1112\u1161\u11ab", "नमस्ते", "שָׁלוֹם", "مَرحبا"),
    *SCRIPTS.split(),
    *(".", "..", "...", "_", "__", "!?", "->", "//", "{}", "$%", "</script>", "{{style}}"),
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|a|>"),
    *("<left>", "<right>", "<both>", "<|", " two words ", "<0xFF>", "ÿ", "Ġ", "\ud800", "\udc00"),
]
FIXED = [
    "",
    " ",
    "\ud800",
    "a\udfff b",
    "<|begin_of_text|>a",
    "<|begin_of_text|><|begin_of_text|>",
    "don't  we'll\r\n 123456 caf\u00e9 cafe\u0301",
    "a" * 3000,
    " " * 600 + "x",
    "\u00e9 " * 300,
    "abcabcdddd ddd",
    "fgfgfg fgfg",
]


def random_texts(count: int, draw: random.Random) -> list[str]:
    """Texts of these pieces, of other code points, and of both."""
    real = "".join(LEARNT)
    texts = list(FIXED)
    while len(texts) < count:
        kind = draw.randrange(4)
        text = ""
        for _ in range(draw.randrange(1, 14)):
            if kind == 0:
                text += draw.choice(PIECES)
            elif kind == 1:
                text += chr(draw.choice([0x80, 0x800, 0x3000, 0x10000, 0x20000, 0x110000]) - 1)
                text += chr(draw.randrange(draw.choice([0x80, 0x800, 0xD800, 0x20000, 0x110000])))
            elif kind == 2:
                start = draw.randrange(len(real))
                text += real[start : start + draw.randrange(40)] + draw.choice(PIECES)
            else:
                text += chr(draw.randrange(0x3000)) + draw.choice(["", " ", draw.choice(PIECES)])
        if kind != 0 or draw.random() < 0.95:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        texts.append(text)
    return texts


def encoded(tokenizer: Tokenizer, text: str) -> list[int] | str:
    try:
        return tokenizer.encode(text).tolist()
    except ValueError as error:
        return str(error)


def same(found: Any, expected: Any) -> bool:
    """Equal tokens; an error names the same place, whatever its quotation marks."""
    if isinstance(expected, str) and expected.startswith("unknown character"):
        expected_place = expected[expected.index("at position") :].partition(":")[0]
        return isinstance(found, str) and f" {expected_place}:" in found
    return found == expected


def is_normalised_alike(forms: list[Any], text: str) -> bool:
    """Whether a text has no character that is newer than the library's normal forms."""
    if any(unicodedata.category(character) == "Cn" for character in text):
        return False
    for form in forms:
        text = text.encode("utf-8", "replace").decode()
        normalised = unicodedata.normalize(form, text)
        if getattr(tk.normalizers, form)().normalize_str(text) != normalised:
            return False
        text = normalised
    return True


def questions_for(tokenizer: Tokenizer, draw: random.Random, count: int = 200) -> Any:
    """Texts to encode, lists of tokens to decode, and single tokens."""
    texts = random_texts(count, random.Random(1))
    forms = vocabulary_of(tokenizer).get("forms")
    if forms:
        texts = [text for text in texts if is_normalised_alike(forms, text)]
        assert len(texts) > count / 2
    size = tokenizer.vocab_size
    ids = [[draw.randrange(size) for _ in range(draw.randrange(8))] for _ in range(count)]
    ids += [tokens for text in texts if isinstance(tokens := encoded(tokenizer, text), list)]
    single = draw.sample(range(size), min(size, count))
    return {"vocabulary": vocabulary_of(tokenizer), "texts": texts, "ids": ids, "single": single}


@pytest.mark.slow
@needs_node
def test_texts_have_the_tokens_of_python(every_tokenizer):
    """Texts encode as in Python, tokens decode as in Python, and so does any list of tokens."""
    draw = random.Random(1)
    questions = [questions_for(tokenizer, draw) for tokenizer in every_tokenizer.values()]

    answers = in_node(*questions)

    for name, asked, answer in zip(every_tokenizer, questions, answers, strict=True):
        tokenizer = every_tokenizer[name]
        assert answer["size"] == tokenizer.vocab_size
        for text, found in zip(asked["texts"], answer["encoded"], strict=True):
            expected = encoded(tokenizer, text)
            assert same(found, expected), (name, text, found, expected)
        for ids, text in zip(asked["ids"], answer["decoded"], strict=True):
            assert text == tokenizer.decode(ids), (name, ids)
        for token, text in zip(asked["single"], answer["single"], strict=True):
            # with the space that begins a word: some decoders strip that of the first token
            twice = tokenizer.decode([token, token])
            assert text == twice[len(tokenizer.decode([token])) :], (name, token)


@needs_node
def test_letters_are_those_of_the_library_s_unicode(every_tokenizer):
    """Not those of the browser, whose Unicode is newer or older."""
    tokenizer = every_tokenizer["llama3"]
    # Between letters, each of these is a letter, a digit or neither.
    names = [chr(point) for point in (0x41, 0x3A9, 0x1E943, 0x323B0, 0x11DE0, 0x2E80, 0xE0100)]
    texts = [f"a{name}a" for name in names]

    (answer,) = in_node({"vocabulary": vocabulary_of(tokenizer), "texts": texts})

    assert answer["encoded"] == [tokenizer.encode(text).tolist() for text in texts]
    (classes,) = [vocabulary_of(tokenizer)["classes"]]
    assert set(classes) == {"L", "N"}


# --- patterns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["a++", r"\w+", "(?>a)", r"\P{L}", "(?i:é)"])
def test_a_pattern_that_is_not_understood_is_not_translated(pattern):
    with pytest.raises(Untranslatable, match="its pattern"):
        translate(pattern)


# --- other tokenizers -----------------------------------------------------------------------------


def test_another_tokenizer_is_refused_with_the_reason():
    with pytest.raises(Uncomputable, match=r"with this tokenizer: its normalizer is Prepend$"):
        vocabulary_of(BPETokenizer(llama2(), vocab_size=1000))
    with pytest.raises(Uncomputable, match=r"it is none of characters, bytes and byte-pairs$"):
        vocabulary_of(NumberTokenizer(11))
