// Markdown in blocks: headings, lists, quotes, tables, code. What is not one of them is a paragraph.

import { appendInline } from "./inline.js";

const MAX_DEPTH = 12; // of lists and quotes in each other
const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const ALIGNMENT = /^:?-+:?$/;

/**
 * Shows `text` in `container`.
 *
 * Blocks that are there already stay, so that a growing answer costs what is new, and a selection
 * in it holds. Returns the number of blocks.
 */
export function showMarkdown(container, text) {
  const blocks = splitBlocks(toLines(text), 0);
  const shown = sources.get(container) ?? [];
  let same = 0;
  while (same < blocks.length && blocks[same].source === shown[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(makeBlock(block, 0));
  sources.set(
    container,
    blocks.map((block) => block.source),
  );
  return blocks.length;
}

const sources = new WeakMap();

function toLines(text) {
  return text.replace(/\r\n?/g, "\n").split("\n");
}

function isBlank(line) {
  return line.trim() === "";
}

/** Returns blocks: {kind, source, ...what the kind needs}. */
function splitBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const read = (depth < MAX_DEPTH && readSpecial(lines, at)) || readParagraph(lines, at, depth);
    blocks.push({ ...read, source: lines.slice(at, read.end).join("\n") });
    at = read.end;
  }
  return blocks;
}

function readSpecial(lines, at) {
  return (
    readFence(lines, at) ??
    readHeading(lines, at) ??
    (RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null) ??
    readQuote(lines, at) ??
    readList(lines, at) ??
    readTable(lines, at)
  );
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end])) {
    if (depth < MAX_DEPTH && interruptsParagraph(lines, end)) break;
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trimStart());
  return { kind: "paragraph", text: text.join("\n"), end };
}

function interruptsParagraph(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  // "1984. It was" in the middle of a paragraph is no list.
  const isItem = item && item[3] && (!/^\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return (
    isItem ||
    HEADING.test(line) ||
    QUOTE.test(line) ||
    RULE.test(line) ||
    Boolean(readFenceOpening(line)) ||
    Boolean(readTableHead(lines, at))
  );
}

function readFenceOpening(line) {
  const found = FENCE.exec(line);
  return found && !(found[2][0] === "`" && found[3].includes("`")) ? found : null;
}

/** An open fence goes to the end: the rest is still to come. */
function readFence(lines, at) {
  const opening = readFenceOpening(lines[at]);
  if (!opening) return null;
  const [, indent, fence, info] = opening;
  const margin = new RegExp(`^ {0,${indent.length}}`);
  const content = [];
  for (let end = at + 1; end < lines.length; end += 1) {
    const closing = lines[end].trim();
    const isFence = closing.length >= fence.length && closing === fence[0].repeat(closing.length);
    if (isFence && /^ {0,3}\S/.test(lines[end])) return code(content, info, end + 1);
    content.push(lines[end].replace(margin, ""));
  }
  return code(content, info, lines.length);
}

function code(content, info, end) {
  return { kind: "code", text: content.join("\n"), language: info.trim().split(/\s/)[0], end };
}

function readHeading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const text = lines[at].slice(found[0].length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  const isClosed = end === 0 || /\s/.test(text[end - 1]);
  const level = found[1].length;
  return { kind: "heading", level, text: isClosed ? text.slice(0, end).trim() : text, end: at + 1 };
}

function readQuote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  return { kind: "quote", lines: lines.slice(at, end).map((line) => line.replace(QUOTE, "")), end };
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function withSpaces(line) {
  const indent = indentOf(line);
  return line.slice(0, indent).replaceAll("\t", "    ") + line.slice(indent);
}

/**
 * Reads the items of one list. More lenient than CommonMark, as models are: two columns more than
 * the list are inside its item, whatever the marker's width.
 */
function readList(lines, at) {
  const first = ITEM.exec(withSpaces(lines[at]));
  if (!first) return null;
  const base = first[1].length;
  const isOrdered = /^\d/.test(first[2]);
  const items = [];
  let isLoose = false;
  let end = at;
  let next = at;
  let isAfterBlank = false;
  for (; next < lines.length; next += 1) {
    const line = withSpaces(lines[next]);
    if (isBlank(line)) {
      isAfterBlank = true;
      items.at(-1).lines.push("");
      continue;
    }
    const marker = ITEM.exec(line);
    const isInside = next > at && indentOf(line) >= base + 2;
    if (isInside) {
      items.at(-1).lines.push(line.slice(Math.min(indentOf(line), items.at(-1).indent)));
    } else if (marker && /^\d/.test(marker[2]) === isOrdered && !RULE.test(line)) {
      const spaces = marker[3].length > 4 ? 1 : marker[3].length;
      const indent = marker[1].length + marker[2].length + spaces;
      items.push({ lines: [line.slice(indent)], indent });
    } else if (!isAfterBlank && !interruptsParagraph(lines, next) && !marker) {
      items.at(-1).lines.push(line.trimStart());
    } else {
      break;
    }
    isLoose ||= isAfterBlank;
    isAfterBlank = false;
    end = next + 1;
  }
  return { kind: "list", isOrdered, start: parseInt(first[2], 10), items, isLoose, end };
}

function splitRow(line) {
  const cells = [""];
  const text = line.trim().replace(/^\|/, "");
  for (let at = 0; at < text.length; at += 1) {
    const isEscaped = text[at] === "\\" && text[at + 1] === "|";
    if (isEscaped) at += 1;
    if (text[at] === "|" && !isEscaped) cells.push("");
    else cells[cells.length - 1] += text[at];
  }
  if (cells.length > 1 && isBlank(cells.at(-1))) cells.pop();
  return cells.map((cell) => cell.trim());
}

function readTableHead(lines, at) {
  const [head, rule] = [lines[at], lines[at + 1] ?? ""];
  if (!head.includes("|") || !rule.includes("-") || !rule.includes("|")) return null;
  const alignments = splitRow(rule);
  const cells = splitRow(head);
  const fits = cells.length === alignments.length && alignments.every((a) => ALIGNMENT.test(a));
  return fits ? { cells, alignments } : null;
}

function readTable(lines, at) {
  const head = readTableHead(lines, at);
  if (!head) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return { kind: "table", ...head, rows: lines.slice(at + 2, end).map(splitRow), end };
}

function make(tag, text) {
  const element = document.createElement(tag);
  if (text !== undefined) appendInline(element, text);
  return element;
}

function makeBlock(block, depth) {
  switch (block.kind) {
    case "code":
      return makeCode(block);
    case "heading": {
      // Below the headings of the page and of the message.
      const heading = make(`h${Math.min(6, block.level + 2)}`, block.text);
      heading.dataset.level = block.level;
      return heading;
    }
    case "rule":
      return make("hr");
    case "quote":
      return appendBlocks(make("blockquote"), block.lines, depth + 1);
    case "list":
      return makeList(block, depth);
    case "table":
      return makeTable(block);
    default:
      return make("p", block.text);
  }
}

function appendBlocks(parent, lines, depth) {
  for (const block of splitBlocks(lines, depth)) parent.append(makeBlock(block, depth));
  return parent;
}

function makeList(block, depth) {
  const list = make(block.isOrdered ? "ol" : "ul");
  if (block.isOrdered && block.start !== 1) list.start = block.start;
  for (const item of block.items) {
    const entry = appendBlocks(make("li"), item.lines, depth + 1);
    if (!block.isLoose) {
      for (const child of [...entry.children]) {
        if (child.tagName === "P") child.replaceWith(...child.childNodes);
      }
    }
    list.append(entry);
  }
  return list;
}

function makeCode(block) {
  const figure = make("figure");
  figure.className = "code";
  const caption = make("figcaption");
  const name = make("span");
  name.textContent = block.language || "text";
  const copy = make("button");
  copy.type = "button";
  copy.className = "plain copy-code";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", "Copy the code");
  caption.append(name, copy);
  const pre = make("pre");
  const content = make("code");
  content.textContent = block.text;
  pre.append(content);
  figure.append(caption, pre);
  return figure;
}

function makeTable(block) {
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const [column, cell] of block.cells.entries()) {
    const header = make("th", cell);
    header.scope = "col";
    header.className = alignment(block, column);
    head.append(header);
  }
  const body = table.createTBody();
  for (const cells of block.rows) {
    const row = body.insertRow();
    for (const column of block.cells.keys()) {
      const cell = row.insertCell();
      cell.className = alignment(block, column);
      appendInline(cell, cells[column] ?? "");
    }
  }
  const frame = make("div");
  frame.className = "table";
  frame.append(table);
  return frame;
}

function alignment(block, column) {
  const rule = block.alignments[column];
  if (!rule.endsWith(":")) return "start";
  return rule.startsWith(":") ? "center" : "end";
}
