"""What of a tokenizer goes into a page: plain JSON, which `browser/tokenizer.js` encodes with.

`vocabulary_of` returns one of three kinds: characters, bytes and byte-level byte-pairs, which give
the same tokens in the page as in Python. A page can't encode with any other tokenizer.

One difference is known: the library's normal forms are those of an old Unicode. A browser also
normalises characters that came later, such as the mark U+1DF6.

The npm package `@huggingface/tokenizers` 0.2.0 can't take its place. Of 398 texts it gave other
tokens than Python for 3 with GPT-2 (its `\\s` includes U+FEFF) and for 88 with SmolLM (its digits
exclude "²"), and GPT-2's page was 380 kB larger.
"""

import base64
import functools
import json
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers

from jgpt.data.byte_pairs import BPETokenizer
from jgpt.data.characters import ByteTokenizer, CharTokenizer, bytes_of_letters
from jgpt.data.encode import Tokenizer
from jgpt.page.program import Uncomputable

NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of words in the tokenizers library's ByteLevel."""
NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


class Untranslatable(ValueError):
    """A part of a tokenizer that JavaScript has no equal for."""


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a page encodes text with, as plain JSON data.

    Its `kind` is "characters", "bytes" or "byte_pairs". Raises Uncomputable for any other
    tokenizer.
    """
    if isinstance(tokenizer, CharTokenizer):
        # As numbers: two lone surrogates side by side would be read as another character.
        code_points = [ord(character) for character in tokenizer.characters]
        return {"kind": "characters", "code_points": code_points}
    if isinstance(tokenizer, ByteTokenizer):
        return {"kind": "bytes"}
    reason = "it is none of characters, bytes and byte-pairs"
    if isinstance(tokenizer, BPETokenizer):
        try:
            return _byte_pairs(tokenizer)
        except Untranslatable as error:
            reason = str(error)
    raise Uncomputable(f"a page can't encode text with this tokenizer: {reason}")


def _byte_pairs(tokenizer: BPETokenizer) -> dict[str, Any]:
    values = json.loads(tokenizer.to_hf().to_str())
    model = values["model"]
    forms = _normal_forms(values["normalizer"])
    vocabulary = _byte_level_vocabulary(model)
    steps, classes = _steps(values["pre_tokenizer"])
    merges, singles = _merges(vocabulary, model["merges"])
    return {
        "kind": "byte_pairs",
        "size": tokenizer.vocab_size,
        "singles": singles,
        "merges": merges,
        "whole_words": bool(model.get("ignore_merges")),
        "forms": forms,
        "steps": steps,
        "classes": classes,
        "added": _added_tokens(tokenizer, values["added_tokens"]),
        "begin": list(tokenizer.begin),
        "end": _tokens_after(tokenizer, values["post_processor"]),
    }


def _byte_level_vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Return the vocabulary of byte-pairs that need no token for what is unknown."""
    vocabulary = model["vocab"]
    missing = set()
    for letter, byte in bytes_of_letters().items():
        if letter not in vocabulary and byte not in NEVER_IN_UTF8:
            missing.add(byte)
    # Without these settings, a byte that has no token is dropped.
    if missing and (model.get("unk_token") or model.get("byte_fallback")):
        raise Untranslatable(f"{len(missing)} bytes have no token")
    return vocabulary


def _normal_forms(normalizer: Any) -> list[str]:
    match normalizer:
        case None:
            return []
        case {"type": "Sequence", "normalizers": list(parts)}:
            forms = []
            for part in parts:
                forms.extend(_normal_forms(part))
            return forms
        case {"type": str(kind)} if kind in NORMAL_FORMS:
            return [kind]
    raise Untranslatable(f"its normalizer is {normalizer.get('type')}")


def _added_tokens(tokenizer: BPETokenizer, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tokens = []
    for token in added:
        text = token["content"]
        # A token of letters of the byte-level alphabet may stand for bytes or for its own text.
        is_literal = tokenizer.decode([token["id"]]) == text
        flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
        tokens.append({"id": token["id"], "text": text, "literal": is_literal} | flags)
    return tokens


def _tokens_after(tokenizer: BPETokenizer, processor: Any) -> list[int]:
    """Return the tokens after a text, of a template that has the text once."""
    parts = [processor]
    if isinstance(processor, dict) and processor["type"] == "Sequence":
        parts = processor["processors"]
    for part in parts:
        match part:
            case None | {"type": "ByteLevel"}:  # this changes offsets, not tokens
                continue
            case {"type": "TemplateProcessing", "single": list(pieces)}:
                if sum("Sequence" in piece for piece in pieces) == 1:
                    continue
        raise Untranslatable("its post_processor is no template of one text")
    return list(tokenizer.end)


# --- merges --------------------------------------------------------------------------------------


def _merges(
    vocabulary: dict[str, int], merges: list[Any]
) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """Return the merges as three columns of tokens, and the tokens that no merge makes.

    A token that is made by a merge has no text here: it is that of the two parts.
    """
    token_of_pair = _tokens_of_merges(vocabulary, merges)
    left = []
    right = []
    merged = []
    for pair, token in token_of_pair.items():
        left.append(pair[0])
        right.append(pair[1])
        merged.append(token)
    columns = {"left": _packed(left), "right": _packed(right), "merged": _packed(merged)}
    # Most tokenizers number their tokens in the order of their merges.
    if all(following == token + 1 for token, following in pairwise(merged)):
        columns["merged"] = {"first": next(iter(merged), 0)}
    return columns, _tokens_with_text(vocabulary, token_of_pair)


def _tokens_of_merges(vocabulary: dict[str, int], merges: list[Any]) -> dict[tuple[int, int], int]:
    """Return the token that each pair of tokens is merged into; earlier pairs are merged first."""
    token_of_pair: dict[tuple[int, int], int] = {}
    for merge in merges:
        left, right = merge
        pair = (vocabulary[left], vocabulary[right])
        # As in the library, the last of equal merges counts, at its place in the order.
        token_of_pair.pop(pair, None)
        token_of_pair[pair] = vocabulary[left + right]
    return token_of_pair


def _tokens_with_text(
    vocabulary: dict[str, int], token_of_pair: dict[tuple[int, int], int]
) -> list[tuple[int, str]]:
    """Return the tokens whose texts the page can't put together from those of merges."""
    tokens = set(vocabulary.values())
    unmerged = tokens.difference(token_of_pair.values())
    has_text = set(unmerged)
    for pair, token in token_of_pair.items():
        if has_text.issuperset(pair):
            has_text.add(token)
    # A merge that comes before those that make its parts leaves its token without a text.
    too_early = tokens - has_text
    return _texts_of(unmerged, vocabulary) + _texts_of(too_early, vocabulary)


def _texts_of(tokens: set[int], vocabulary: dict[str, int]) -> list[tuple[int, str]]:
    """Return tokens and their texts, in the order of the tokens."""
    with_text = []
    for text, token in vocabulary.items():
        if token in tokens:
            with_text.append((token, text))
    return sorted(with_text)


def _packed(integers: Sequence[int]) -> dict[str, Any]:
    """Return integers as bytes in base64: all lowest bytes first, then all second ones, and so on.

    In this order gzip makes them smaller, since higher bytes are often equal.
    """
    bits = max(integers, default=0).bit_length()
    width = max(1, math.ceil(bits / 8))
    # Little-endian: the first `width` bytes of each integer are those that are used.
    all_bytes = np.array(integers, "<u4").view(np.uint8).reshape(-1, 4)  # integer byte
    used_bytes = all_bytes[:, :width]
    return {"width": width, "data": base64.b64encode(used_bytes.T.tobytes()).decode()}


# --- words ---------------------------------------------------------------------------------------


def _steps(pre_tokenizer: Any) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """Return the steps that split a text into words, and the classes in their patterns."""
    parts = [pre_tokenizer]
    if isinstance(pre_tokenizer, dict) and pre_tokenizer["type"] == "Sequence":
        parts = pre_tokenizer["pretokenizers"]
    kinds = [(part or {}).get("type") for part in parts]
    # Once and at the end: what splits a text sees characters, and not yet bytes.
    if kinds.count("ByteLevel") != 1 or kinds[-1] != "ByteLevel":
        raise Untranslatable("its pre_tokenizer does not end in bytes")
    steps: list[dict[str, Any]] = []
    patterns = []
    for part in parts:
        match part:
            case {"type": "ByteLevel"}:
                if part["add_prefix_space"]:
                    steps.append({"prefix": " "})
                if part.get("use_regex", True):
                    patterns.append(GPT2_WORDS)
                    steps.append({"split": translate(GPT2_WORDS)})
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                patterns.append(pattern)
                steps.append({"split": translate(pattern)})
            case {"type": "Digits", "individual_digits": bool(is_individual)}:
                pattern = r"\p{N}+"
                if is_individual:
                    pattern = r"\p{N}"
                patterns.append(pattern)
                steps.append({"split": translate(pattern)})
            case _:
                raise Untranslatable(f"its pre_tokenizer has {part['type']}")
    return steps, _classes_in(" ".join(patterns))


def _classes_in(patterns: str) -> dict[str, list[int]]:
    """Return the classes of code points that patterns name, as `_class_of` finds them."""
    names = sorted(set(re.findall(r"\\p\{(\w+)\}", patterns)))
    if r"\d" in patterns:
        names.append("Nd")
    return {name: list(_class_of(name)) for name in names}


@functools.cache
def _class_of(name: str) -> tuple[int, ...]:
    r"""Return the code points of `\p{name}` as gaps and lengths of ranges, in turn.

    The library knows another version of Unicode than a browser does: of 141,028 letters of
    Unicode 16, a browser of Unicode 17 has 4,644 more. So the library itself is asked.
    """
    # Planes 4 to 13 have no characters, and those from 15 on are for private use.
    # From 0xD800 to 0xDFFF are surrogates, which no text of the library has.
    code_points = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000)]
    every_character = "".join(map(chr, code_points))
    members = tokenizers.Regex(rf"\p{{{name}}}+")
    splitter = tokenizers.pre_tokenizers.Split(members, "removed")
    is_outside = np.zeros(len(code_points), bool)
    for _, (start, end) in splitter.pre_tokenize_str(every_character):
        is_outside[start:end] = True
    # One more than the last code point, so that a range at the end has a border after it.
    is_inside = np.zeros(0xE1001, np.int8)
    is_inside[code_points] = ~is_outside
    borders = np.flatnonzero(np.diff(is_inside, prepend=0))
    return tuple(np.diff(borders, prepend=0).tolist())


# The parts of a pattern. Two letters in any case may equal another, as the ligature of s and t.
_SYNTAX = r"(?P<open>\(\?(?:i?:|[!=]))|(?P<same>[|)]|(?:[*+?]|\{\d+(?:,\d*)?\})(?![*+?{]))"
_ESCAPE = r"\\p\{\w+\}|\\[sSdrntf]|\\[^\w\s]"
_IN_BRACKETS = r"[^\\\[\]&^-]"
_BRACKET = rf"\[(?P<bracket>\^?(?:{_ESCAPE}|{_IN_BRACKETS}(?:-{_IN_BRACKETS})?)+)\]"
_LETTER = r"[^\\^$.*+?()\[\]{}]"
_PART = re.compile(rf"{_SYNTAX}|{_BRACKET}|(?P<escape>{_ESCAPE})|(?P<letter>{_LETTER})")
_PART_IN_ANY_CASE = re.compile(
    rf"{_SYNTAX}|(?!\\p)(?P<escape>{_ESCAPE})|(?!(?i:f[fil]|s[st])|[^\0-\x7f])(?P<letter>{_LETTER})"
)


def translate(pattern: str) -> str:
    r"""Translate a regular expression of the tokenizers library, which is Oniguruma's, to
    JavaScript's with the flag u.

    A class `\p{name}` is left for the page, inside brackets. Raises Untranslatable for what is not
    needed for words: anchors, captures, and possessive and lazy repetitions.
    """
    source = ""
    ignores_case = [False]  # in each group around
    place = 0
    while place < len(pattern):
        part = _PART
        if ignores_case[-1]:
            part = _PART_IN_ANY_CASE
        found = part.match(pattern, place)
        if found is None:
            shown = pattern[place : place + 20]
            raise Untranslatable(f"its pattern has {shown!r}, which the page can't translate")
        place = found.end()
        text = found[0]
        match found.lastgroup:
            case "open":
                ignores_case.append(ignores_case[-1] or "i" in text)
                source += text.replace("i", "")
            case "same":
                if text == ")":
                    ignores_case.pop()
                source += text
            case "bracket":
                inside = re.sub(
                    f"{_ESCAPE}|{_IN_BRACKETS}", lambda item: _spelt(item[0]), found["bracket"]
                )
                source += f"[{inside}]"
            case "letter" if ignores_case[-1]:
                source += _in_any_case(text)
            case _:
                spelt = _spelt(text)
                if not spelt.startswith(r"\u"):  # a class, whose ranges stand in brackets
                    spelt = f"[{spelt}]"
                source += spelt
    return source


def _in_any_case(letter: str) -> str:
    """Return the characters that are equal to one where case is ignored."""
    equal = {letter.lower(), letter.upper()}
    match letter.lower():
        case "s":
            equal.add("\u017f")  # the long s
        case "k":
            equal.add("\u212a")  # the sign for kelvin
    return "[" + "".join(map(_spelt, sorted(equal))) + "]"


def _spelt(text: str) -> str:
    r"""Return a character by its code point, and a class such as `\s` by its name."""
    classes = {r"\s": r"\p{White_Space}", r"\S": r"\P{White_Space}", r"\d": r"\p{Nd}"}
    if text.startswith(r"\p") or text in classes:
        return classes.get(text, text)
    controls = {r"\r": "\r", r"\n": "\n", r"\t": "\t", r"\f": "\f"}
    character = controls.get(text, text[-1])
    return rf"\u{{{ord(character):x}}}"
