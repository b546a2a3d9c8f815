/**
 * Markdown as models write it: headings, lists, quotes, tables, code, emphasis, links. What is not
 * known stays as it was written. Elements are built from nodes, so HTML in it is text.
 */

import { el } from "../dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const DIVIDER = /^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?$/; // of a trimmed line, so that each space has one place
const INLINE =
  /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|(?<![\w*])\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?!\w)|(?<!\w)_(?=\S)(.+?)(?<=\S)_(?!\w)|~~(.+?)~~|\[([^\]\n]+)\]\((\S+?)\)/s;

const DEEP = 20; // lists and quotes within each other; further ones are shown as they are
const LONG = 20_000; // characters of a paragraph; a longer one is no prose, and is shown as it is

/** The elements of a text. */
export function markdown(text) {
  return blocks(text.split(/\r\n?|\n/), 0);
}

function blocks(lines, depth) {
  if (depth > DEEP) return [el("p", {}, broken(lines.join("\n")))];
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (fence) {
      const end = closing(lines, at + 1, fence[1]);
      found.push(code(lines.slice(at + 1, end).join("\n"), fence[2]));
      at = end + 1;
    } else if (heading) {
      found.push(el(`h${Math.min(heading[1].length + 2, 6)}`, {}, inline(heading[2])));
      at++;
    } else if (RULE.test(line)) {
      found.push(el("hr"));
      at++;
    } else if (ITEM.test(line)) {
      const end = while_(lines, at, (each, i) => ITEM.test(each) || (i > at && isWithin(lines, i)));
      found.push(list(lines.slice(at, end), depth));
      at = end;
    } else if (line.startsWith(">")) {
      const end = while_(lines, at, (each) => each.startsWith(">"));
      const quoted = lines.slice(at, end).map((each) => each.replace(/^>\s?/, ""));
      found.push(el("blockquote", {}, blocks(quoted, depth + 1)));
      at = end;
    } else if (line.includes("|") && DIVIDER.test((lines[at + 1] ?? "").trim())) {
      const end = while_(lines, at, (each) => each.includes("|"));
      found.push(table(lines.slice(at, end)));
      at = end;
    } else if (line.trim() === "") {
      at++;
    } else {
      const end = while_(lines, at, (each, i) => i === at || (each.trim() !== "" && !begins(each)));
      found.push(el("p", {}, inline(lines.slice(at, end).join("\n"))));
      at = end;
    }
  }
  return found;
}

/** Whether a line ends a paragraph before it. */
function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || line.startsWith(">");
}

/** The first line from `at` on for which `holds` is false. */
function while_(lines, at, holds) {
  let end = at;
  while (end < lines.length && holds(lines[end], end)) end++;
  return end;
}

/** Whether a line goes on with the item above: it is indented, or an empty line before such. */
function isWithin(lines, at) {
  if (lines[at].trim() === "") {
    if (lines[at - 1].trim() === "") return true; // as that one was
    const next = lines.slice(at).find((line) => line.trim() !== "") ?? "";
    return /^\s{2,}/.test(next) || ITEM.test(next);
  }
  return /^\s{2,}/.test(lines[at]);
}

function closing(lines, at, mark) {
  return while_(lines, at, (line) => !line.trim().startsWith(mark));
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) items.push([item[3]]);
    else items.at(-1).push(line.replace(/^\s{1,4}/, ""));
  }
  const start = Number.parseInt(mark, 10);
  const children = items.map((item) => el("li", {}, unwrapped(blocks(item, depth + 1))));
  return Number.isNaN(start) ? el("ul", {}, children) : el("ol", { start }, children);
}

/** The elements of an item, whose only paragraph needs none of its own. */
function unwrapped(elements) {
  const [first, ...rest] = elements;
  return first?.tagName === "P" ? [...first.childNodes, ...rest] : elements;
}

function table([head, , ...rows]) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split("|");
  const row = (tag) => (line) =>
    el(
      "tr",
      {},
      cells(line).map((cell) => el(tag, {}, inline(cell.trim()))),
    );
  return el(
    "div.scroll",
    {},
    el("table", {}, el("thead", {}, row("th")(head)), el("tbody", {}, rows.map(row("td")))),
  );
}

function code(text, language) {
  const copy = el("button.link", { type: "button", onclick: () => copyText(text, copy) }, "Copy");
  return el(
    "figure.code",
    {},
    el("figcaption", {}, el("span", {}, language || "text"), copy),
    el("pre", { tabindex: "0" }, el("code", {}, text)),
  );
}

/** Puts a text into the clipboard, and says so on the button. */
export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser refused"; // secure origins only
  }
  setTimeout(() => {
    button.textContent = label;
  }, 1500);
}

function inline(text) {
  if (text.length > LONG) return [text];
  const found = [];
  let rest = text;
  for (let match = INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    const [all, , literal, bold, star, line, struck, label, address] = match;
    found.push(...broken(rest.slice(0, match.index)));
    if (literal !== undefined) found.push(el("code", {}, literal));
    else if (bold !== undefined) found.push(el("strong", {}, inline(bold)));
    else if (struck !== undefined) found.push(el("s", {}, inline(struck)));
    else if (label !== undefined) found.push(link(label, address));
    else found.push(el("em", {}, inline(star ?? line)));
    rest = rest.slice(match.index + all.length);
  }
  return [...found, ...broken(rest)];
}

/** Lines of a paragraph: models mean the breaks that they write. */
function broken(text) {
  return text.split("\n").flatMap((line, index) => (index ? [el("br"), line] : [line]));
}

function link(label, address) {
  if (!/^(https?|mailto):/i.test(address)) return `${label} (${address})`;
  const outside = { href: address, target: "_blank", rel: "noopener noreferrer" };
  return el("a", outside, inline(label));
}
