// The tokenizer, from what vocabulary.py put into the page

/** A tokenizer: `encode(text)` and `decode(tokens)` as in Python, `textOf(token)` for a token that
 *  follows another, and `size`. They throw an Error with one line where Python raises ValueError. */
function makeTokenizer(vocabulary) {
  const kinds = {
    characters: characterTokenizer,
    bytes: byteTokenizer,
    byte_pairs: bytePairTokenizer,
  };
  const { size, encode, decode, textOf } = kinds[vocabulary.kind](vocabulary);
  const decodeKnown = tokens => {
    tokens.forEach((token, position) => {
      if (Number.isInteger(token) && token >= 0 && token < size) return;
      throw new Error(`token ${token} at position ${position} is outside the vocabulary of ${size}`);
    });
    return decode(tokens);
  };
  // As in Python: two of a token, without the first. A decoder may strip the first one's space.
  const textOfSecond = token => {
    const first = [...decodeKnown([token])];
    return [...decodeKnown([token, token])].slice(first.length).join("");
  };
  return { size, encode, decode: decodeKnown, textOf: textOf ?? textOfSecond };
}

function characterTokenizer({ code_points }) {
  // Lone surrogates are characters, too; two of them side by side would be another character.
  const characters = code_points.map(point => String.fromCodePoint(point));
  const tokens = new Map(code_points.map((point, token) => [point, token]));
  const known = characters.slice(0, 100).join("") + (characters.length > 100 ? "…" : "");
  const encode = text => [...text].map((character, position) => {
    const token = tokens.get(character.codePointAt(0));
    if (token !== undefined) return token;
    throw new Error(`unknown character “${character}” at position ${position}: `
      + `the vocabulary is the ${characters.length} characters “${known}”`);
  });
  const decode = ids => ids.map(token => characters[token]).join("");
  return { size: characters.length, encode, decode, textOf: token => characters[token] };
}

/** The bytes of a text, lone surrogates included, which TextEncoder would replace. */
function bytesOfText(text) {
  const bytes = [];
  for (const character of text) {
    const point = character.codePointAt(0);
    if (point < 0x80) bytes.push(point);
    else if (point < 0x800) bytes.push(0xC0 | point >> 6, 0x80 | point & 63);
    else if (point < 0x10000) {
      bytes.push(0xE0 | point >> 12, 0x80 | point >> 6 & 63, 0x80 | point & 63);
    } else {
      bytes.push(0xF0 | point >> 18, 0x80 | point >> 12 & 63, 0x80 | point >> 6 & 63,
        0x80 | point & 63);
    }
  }
  return bytes;
}
/** The text of bytes; what is no UTF-8 becomes the replacement character. */
function textOfBytes(bytes) {
  // A byte order mark is a character of the text.
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
}
function byteTokenizer() {
  return { size: 256, encode: bytesOfText, decode: textOfBytes };
}

// Byte-level byte-pairs, as the tokenizers library encodes with them

/** The letter of each byte: printable bytes are themselves, the others the letters from 256 on. */
function lettersOfBytes() {
  const isPrintable = byte => byte > 32 && byte < 127 || byte > 160 && byte !== 173;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) =>
    String.fromCharCode(isPrintable(byte) ? byte : next++));
}
/** Integers that were sent as bytes: all lowest bytes first, then all second ones, and so on. */
function integersOf({ data, width }) {
  const bytes = atob(data);
  const count = bytes.length / width;
  const integers = new Int32Array(count);
  for (let i = 0; i < bytes.length; i++) {
    integers[i % count] |= bytes.charCodeAt(i) << 8 * Math.floor(i / count);
  }
  return integers;
}
/** The rank of each pair of tokens, in a table with open addresses. */
function rankTable(left, right) {
  const bits = 32 - Math.clz32(2 * left.length + 1);
  const slots = new Int32Array(1 << bits).fill(-1);
  const start = (one, other) =>
    (Math.imul(one, 0x9E3779B1) ^ Math.imul(other, 0x85EBCA6B)) >>> 32 - bits;
  const slotOf = (one, other) => {
    let slot = start(one, other);
    while (slots[slot] >= 0 && (left[slots[slot]] !== one || right[slots[slot]] !== other)) {
      slot = slot + 1 & slots.length - 1;
    }
    return slot;
  };
  for (let rank = 0; rank < left.length; rank++) slots[slotOf(left[rank], right[rank])] = rank;
  return (one, other) => slots[slotOf(one, other)];
}
/** A pattern of vocabulary.py, in which each \p{name} stands for ranges of code points. */
function patternOf(source, classes) {
  const hex = point => `\\u{${point.toString(16)}}`;
  const ranges = {};
  for (const [name, gapsAndLengths] of Object.entries(classes)) {
    let point = 0;
    ranges[name] = "";
    for (let i = 0; i < gapsAndLengths.length; i += 2) {
      const first = point + gapsAndLengths[i];
      point = first + gapsAndLengths[i + 1];
      ranges[name] += `${hex(first)}-${hex(point - 1)}`;
    }
  }
  const spelt = source.replace(/\\p\{(\w+)\}/g, (whole, name) => ranges[name] ?? whole);
  return new RegExp(spelt, "gu");
}

function bytePairTokenizer(vocabulary) {
  const { size, singles, merges, whole_words, forms, steps, classes, added, begin, end } = vocabulary;
  const left = integersOf(merges.left);
  const right = integersOf(merges.right);
  const merged = merges.merged.data ? integersOf(merges.merged)
    : left.map((_, rank) => merges.merged.first + rank);
  const rankOf = rankTable(left, right);
  const letters = lettersOfBytes();
  const byteOf = new Map(letters.map((letter, byte) => [letter, byte]));

  // The tokens of the model, made from single ones in the order of the merges.
  const single = new Map(singles.map(([token, text]) => [token, text]));
  const tokenOfLetter = new Map(singles.map(([token, text]) => [text, token]));
  const madeBy = new Map();
  merged.forEach((token, rank) => {
    const isMade = part => single.has(part) || madeBy.has(part);
    if (!isMade(token) && isMade(left[rank]) && isMade(right[rank])) madeBy.set(token, rank);
  });
  function lettersOf(token) {
    let text = "";
    const pending = [token];
    while (pending.length) {
      const part = pending.pop();
      const rank = madeBy.get(part);
      if (rank === undefined) text += single.get(part) ?? "";
      else pending.push(right[rank], left[rank]);
    }
    return text;
  }
  let words = null;  // the token of each text in letters, where whole words need no merges
  function wholeWord(text) {
    if (!words) {
      const texts = new Map(single);
      for (const [token, rank] of madeBy) {  // in order: its parts were made before
        texts.set(token, texts.get(left[rank]) + texts.get(right[rank]));
      }
      words = new Map([...texts].map(([token, text]) => [text, token]));
    }
    return words.get(text);
  }

  // Added tokens are found before a text is split into words.
  const addedById = new Map(added.map(each => [each.id, each]));
  const normalised = text => forms.reduce((found, form) => found.normalize(form), text);
  const inWord = String.raw`[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]`;
  const wordBefore = new RegExp(`${inWord}$`, "u");
  const wordAfter = new RegExp(`^${inWord}`, "u");
  function finderOf(tokens, textOf) {
    const found = new Map(tokens.map(each => [textOf(each.text), each]));
    const texts = [...found.keys()].sort((a, b) => b.length - a.length);
    const escaped = texts.map(text => text.replace(/[\\^$.*+?()[\]{}|\/]/g, "\\$&"));
    return { found, pattern: texts.length ? new RegExp(escaped.join("|"), "gu") : null };
  }
  const exact = finderOf(added.filter(each => !each.normalized), text => text);
  const normal = finderOf(added.filter(each => each.normalized), normalised);
  /** The parts of a text: numbers of added tokens, and the texts between them. */
  function partsOf(text, { found, pattern }) {
    if (!pattern || !text) return [text];
    const parts = [];
    let done = 0;
    for (const match of text.matchAll(pattern)) {
      const token = found.get(match[0]);
      let start = match.index;
      let stop = start + match[0].length;
      const before = text.slice(0, start);
      const after = text.slice(stop);
      if (token.single_word && (wordBefore.test(before) || wordAfter.test(after))) continue;
      if (token.lstrip) {
        start = Math.max(done, before.length - before.match(/\p{White_Space}*$/u)[0].length);
      }
      if (token.rstrip) stop += after.match(/^\p{White_Space}*/u)[0].length;
      if (done < start) parts.push(text.slice(done, start));
      parts.push(token.id);
      done = stop;
    }
    if (done < text.length) parts.push(text.slice(done));
    return parts;
  }

  const split = steps.map(step => step.split === undefined ? null : patternOf(step.split, classes));
  /** The words of a text: each match of a pattern, and what lies between matches. */
  function wordsOf(text) {
    let found = [text];
    steps.forEach((step, i) => {
      if (!split[i]) {
        found = found.map(word => word.startsWith(" ") ? word : ` ${word}`);
        return;
      }
      found = found.flatMap(word => {
        const parts = [];
        let done = 0;
        for (const match of word.matchAll(split[i])) {
          if (done < match.index) parts.push(word.slice(done, match.index));
          parts.push(match[0]);
          done = match.index + match[0].length;
        }
        if (done < word.length) parts.push(word.slice(done));
        return parts;
      });
    });
    return found;
  }

  /** Merge pairs of tokens, the lowest rank first, and of one rank the leftmost first. */
  function mergePairs(tokens) {
    while (tokens.length > 1) {
      let lowest = Infinity;
      const rankAt = i => {
        const rank = rankOf(tokens[i], tokens[i + 1]);
        return rank < 0 ? Infinity : rank;
      };
      for (let i = 0; i + 1 < tokens.length; i++) lowest = Math.min(lowest, rankAt(i));
      if (lowest === Infinity) break;
      // All pairs of this rank in one pass, unless a merge makes a pair of a lower rank.
      const after = [];
      let i = 0;
      while (i < tokens.length) {
        if (i + 1 < tokens.length && rankAt(i) === lowest) {
          const made = merged[lowest];
          after.push(made);
          i += 2;
          const rankBefore = after.length > 1 ? rankOf(after.at(-2), made) : -1;
          const rankAfter = i < tokens.length ? rankOf(made, tokens[i]) : -1;
          if (Math.min(rankBefore >>> 0, rankAfter >>> 0) < lowest) break;
        } else {
          after.push(tokens[i]);
          i += 1;
        }
      }
      while (i < tokens.length) after.push(tokens[i++]);
      tokens = after;
    }
    return tokens;
  }
  const remembered = new Map();
  function tokensOfWord(word) {
    const known = remembered.get(word);
    if (known) return known;
    const spelt = bytesOfText(word).map(byte => letters[byte]);
    const whole = whole_words ? wholeWord(spelt.join("")) : undefined;
    const tokens = whole !== undefined ? [whole]
      : mergePairs(spelt.map(letter => tokenOfLetter.get(letter)).filter(each => each !== undefined));
    if (remembered.size > 10_000) remembered.clear();
    remembered.set(word, tokens);
    return tokens;
  }

  function encode(text) {
    if (/\p{Surrogate}/u.test(text)) {
      throw new Error("the text contains a lone surrogate, which UTF-8 cannot represent");
    }
    const tokens = [];
    const encodeParts = (parts, encodeText) => {
      for (const part of parts) {
        if (typeof part === "number") tokens.push(part);
        else if (part) encodeText(part);
      }
    };
    encodeParts(partsOf(text, exact), part => {
      encodeParts(partsOf(normalised(part), normal), plain => {
        for (const word of wordsOf(plain)) {
          for (const token of tokensOfWord(word)) tokens.push(token);
        }
      });
    });
    // A text that already begins with these tokens gets no second ones.
    const begins = begin.length && begin.every((token, i) => tokens[i] === token);
    return [...(begins ? [] : begin), ...tokens, ...end];
  }

  /** The bytes of a token: of its letters, or of its text where that isn't made of letters. */
  function bytesOfToken(token) {
    const special = addedById.get(token);
    if (special?.literal) return bytesOfText(special.text);
    const text = special?.text ?? lettersOf(token);
    const bytes = [...text].map(letter => byteOf.get(letter));
    return bytes.includes(undefined) ? bytesOfText(text) : bytes;
  }
  const decode = ids => textOfBytes(ids.flatMap(bytesOfToken));
  return { size, encode, decode };
}
