// Markdown inside a line: code, emphasis, links. Makes nodes, never markup: what the model writes
// can become text, or one of the few elements named here, and nothing else.

const MAX_DEPTH = 16; // of emphasis in emphasis
const MAX_LINK_TEXT = 1000;
const MAX_URL = 2000;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const LINE_BREAK = /<br ?\/?>/iy;
const BARE_URL = /https?:\/\/[^\s<>"`]+/y;

/** Appends `text` to `parent`, as nodes. */
export function appendInline(parent, text) {
  new InlineParser(text, 0, false).appendTo(parent);
}

/** Returns the address to link to, or null for one that is not http, https or mailto. */
function safeUrl(address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

function makeLink(address) {
  const link = document.createElement("a");
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

class InlineParser {
  #text;
  #depth;
  #isInLink;
  #at = 0;
  #plain = "";
  // Delimiter -> where a search for its end has failed; later ones fail too, so none is made.
  #hasNoEnd = new Map();

  constructor(text, depth, isInLink) {
    this.#text = text;
    this.#depth = depth;
    this.#isInLink = isInLink;
  }

  appendTo(parent) {
    const special = /[\\`*_~[!<\n]|https?:\/\//g;
    while (this.#at < this.#text.length) {
      special.lastIndex = this.#at;
      const found = special.exec(this.#text);
      const end = found ? found.index : this.#text.length;
      this.#plain += this.#text.slice(this.#at, end);
      this.#at = end;
      if (!found) break;
      const node = this.#node(found[0][0]);
      if (node) {
        this.#flush(parent);
        parent.append(node);
      }
    }
    this.#flush(parent);
  }

  #flush(parent) {
    if (this.#plain) parent.append(this.#plain);
    this.#plain = "";
  }

  /** Reads on; returns a node, or null where what was read is plain text. */
  #node(character) {
    switch (character) {
      case "\\":
        return this.#escape();
      case "\n":
        this.#plain = this.#plain.trimEnd();
        this.#at += 1;
        return document.createElement("br");
      case "`":
        return this.#code();
      case "[":
        return this.#link(this.#at) ?? this.#take(1);
      case "!":
        return this.#image() ?? this.#take(1);
      case "<":
        return this.#angle() ?? this.#take(1);
      case "h":
        return this.#bareUrl();
      default:
        return this.#emphasis(character);
    }
  }

  #take(count) {
    this.#plain += this.#text.slice(this.#at, this.#at + count);
    this.#at += count;
    return null;
  }

  #inside(element, from, to, isInLink = this.#isInLink) {
    new InlineParser(this.#text.slice(from, to), this.#depth + 1, isInLink).appendTo(element);
    return element;
  }

  #escape() {
    const next = this.#text[this.#at + 1] ?? "";
    if (next === "\n") {
      this.#at += 2;
      return document.createElement("br");
    }
    if (PUNCTUATION.test(next)) this.#at += 1;
    return this.#take(1);
  }

  #code() {
    const length = this.#runLength(this.#at);
    const end = this.#codeEnd(this.#at, length);
    if (end < 0) return this.#take(length);
    let content = this.#text.slice(this.#at + length, end - length).replaceAll("\n", " ");
    if (content.startsWith(" ") && content.endsWith(" ") && content.trim()) {
      content = content.slice(1, -1);
    }
    this.#at = end;
    const code = document.createElement("code");
    code.textContent = content;
    return code;
  }

  /** Returns where the code span that begins at `from` ends, or -1. */
  #codeEnd(from, length) {
    const name = `\`${length}`;
    if (from >= (this.#hasNoEnd.get(name) ?? Infinity)) return -1;
    let at = from + length;
    while ((at = this.#text.indexOf("`", at)) >= 0) {
      const run = this.#runLength(at);
      at += run;
      if (run === length) return at;
    }
    this.#hasNoEnd.set(name, from);
    return -1;
  }

  #runLength(from) {
    let end = from + 1;
    while (this.#text[end] === this.#text[from]) end += 1;
    return end - from;
  }

  #emphasis(character) {
    const run = this.#runLength(this.#at);
    const before = this.#text[this.#at - 1] ?? " ";
    const after = this.#text[this.#at + run] ?? " ";
    const opens = !/\s/.test(after) && !(character === "_" && WORD.test(before));
    if (!opens || this.#depth === MAX_DEPTH || run > 3) return this.#take(run);
    const length = this.#emphasisLength(character, run);
    if (length === 0) return this.#take(run);
    if (length < 0) this.#take(run + length); // more open than close
    const used = Math.abs(length);
    const end = this.#emphasisEnd(this.#at + used, character, used);
    return end < 0 ? this.#take(used) : this.#emphasized(character, used, end);
  }

  /**
   * Returns how many of the run's characters open emphasis here: those first in it, or, if
   * negative, those last in it. The others belong to the text, or to emphasis inside.
   */
  #emphasisLength(character, run) {
    const end = (length) => {
      const found = this.#emphasisEnd(this.#at + run, character, length);
      return found < 0 ? Infinity : found;
    };
    if (character === "~") return run === 2 && end(2) < Infinity ? 2 : 0;
    const [one, two] = [end(1), run > 1 ? end(2) : Infinity];
    if (run === 3 && end(3) <= Math.min(one, two, Number.MAX_VALUE)) return 3;
    if (run === 3 && one < Infinity && two < Infinity) return two < one ? 1 : 2;
    if (two < Infinity) return run === 2 ? 2 : -2;
    if (one < Infinity) return run === 1 ? 1 : -1;
    return 0;
  }

  #emphasized(character, length, end) {
    const [from, to] = [this.#at + length, end - length];
    this.#at = end;
    if (character === "~") return this.#inside(document.createElement("del"), from, to);
    const inner = document.createElement(length === 1 ? "em" : "strong");
    this.#inside(inner, from, to);
    if (length < 3) return inner;
    const outer = document.createElement("em");
    outer.append(inner);
    return outer;
  }

  /** Returns where emphasis whose text begins at `from` ends, its delimiter included, or -1. */
  #emphasisEnd(from, character, length) {
    const name = character + length;
    if (from >= (this.#hasNoEnd.get(name) ?? Infinity)) return -1;
    const next = character === "*" ? /[\\`*]/g : character === "_" ? /[\\`_]/g : /[\\`~]/g;
    next.lastIndex = from;
    let found;
    while ((found = next.exec(this.#text))) {
      const at = found.index;
      if (found[0] === "\\") {
        next.lastIndex = at + 2;
        continue;
      }
      const run = this.#runLength(at);
      next.lastIndex = at + run;
      if (found[0] === "`") {
        const end = this.#codeEnd(at, run);
        if (end >= 0) next.lastIndex = end;
      } else if (at > from && this.#closes(at, run, character, length)) {
        return at + run;
      }
    }
    this.#hasNoEnd.set(name, from);
    return -1;
  }

  #closes(at, run, character, length) {
    if (/\s/.test(this.#text[at - 1])) return false;
    if (character === "_" && WORD.test(this.#text[at + run] ?? " ")) return false;
    // A run of two inside single emphasis is a bold part of it.
    return length === 1 ? run === 1 || run === 3 : run >= length;
  }

  /** Reads `[text](address)` whose bracket is at `from`; null, and nothing read, if it is none. */
  #link(from) {
    const textEnd = this.#isInLink ? -1 : this.#bracketEnd(from);
    const target = textEnd < 0 ? null : this.#target(textEnd);
    if (!target) return null;
    this.#at = target.end;
    const link = makeLink(target.address);
    this.#inside(link, from + 1, textEnd - 1, true);
    if (!link.textContent) link.textContent = target.address;
    return link;
  }

  /** Pictures are not fetched: the page asks nobody but its own server. */
  #image() {
    return this.#text[this.#at + 1] === "[" ? this.#link(this.#at + 1) : null;
  }

  #bracketEnd(from) {
    const limit = Math.min(this.#text.length, from + MAX_LINK_TEXT);
    let open = 0;
    for (let at = from; at < limit; at += 1) {
      const character = this.#text[at];
      if (character === "\\") at += 1;
      else if (character === "[") open += 1;
      else if (character === "]" && --open === 0) return at + 1;
    }
    return -1;
  }

  /** Reads `(address "title")` at `from`. */
  #target(from) {
    if (this.#text[from] !== "(") return null;
    const limit = Math.min(this.#text.length, from + MAX_URL);
    let open = 0;
    let at = from;
    for (; at < limit; at += 1) {
      const character = this.#text[at];
      if (/\s/.test(character)) break;
      if (character === "(") open += 1;
      else if (character === ")" && --open === 0) break;
    }
    const address = safeUrl(this.#text.slice(from + 1, at).replace(/^<(.*)>$/, "$1"));
    const rest = /\s*(?:"[^"\n]*"|'[^'\n]*')?\s?\)/y;
    rest.lastIndex = at;
    return address && rest.test(this.#text) ? { address, end: rest.lastIndex } : null;
  }

  #angle() {
    LINE_BREAK.lastIndex = AUTOLINK.lastIndex = this.#at;
    if (LINE_BREAK.test(this.#text)) {
      this.#at = LINE_BREAK.lastIndex;
      return document.createElement("br");
    }
    const found = this.#isInLink ? null : AUTOLINK.exec(this.#text);
    const address = found && safeUrl(found[1]);
    if (!address) return null;
    this.#at += found[0].length;
    const link = makeLink(address);
    link.textContent = found[1].replace(/^mailto:/, "");
    return link;
  }

  #bareUrl() {
    BARE_URL.lastIndex = this.#at;
    const found = BARE_URL.exec(this.#text);
    const isPartOfWord = WORD.test(this.#text[this.#at - 1] ?? " ");
    if (!found || isPartOfWord || this.#isInLink) return this.#take(4);
    const shown = withoutPunctuation(found[0]);
    const address = safeUrl(shown);
    if (!address) return this.#take(shown.length);
    this.#at += shown.length;
    const link = makeLink(address);
    link.textContent = shown;
    return link;
  }
}

/** Cuts what ends the sentence rather than the address; a bracket only if none opened. */
function withoutPunctuation(address) {
  let end = address.length;
  while (end > 0) {
    const last = address[end - 1];
    const unopened = last === ")" && !address.slice(0, end).includes("(");
    if (!unopened && !".,;:!?'*_~]".includes(last)) break;
    end -= 1;
  }
  return address.slice(0, end);
}
