/** A turn of a conversation as it is shown, also while it is written. */

import { el, show } from "../dom.js";
import { copyText, markdown } from "./markdown.js";

/**
 * The element of a turn.
 *
 * @param {object} turn see `conversations.js`
 * @param {{edit?: () => void, retry?: () => void, answer?: (call: object, content: string) => void,
 *   open: object[]}} actions what can be done with it; `open` are the calls to answer
 */
export function turnOf(turn, { edit, retry, answer, open }) {
  const copy = el("button.link", { type: "button" }, "Copy");
  copy.addEventListener("click", () => copyText(turn.content, copy));
  return el(
    "li.turn",
    { "data-role": turn.role },
    turn.role === "assistant" ? replied(turn, { answer, open }) : asked(turn),
    el(
      "p.turn-actions",
      {},
      turn.note && el("span.note", {}, turn.note),
      turn.content && copy,
      edit && el("button.link", { type: "button", onclick: edit }, "Edit"),
      retry && el("button.link", { type: "button", onclick: retry }, "Retry"),
    ),
  );
}

/** A reply that is being written; `update` shows what has come so far, once a frame. */
export function writing() {
  const body = el("div.body", {}, el("p.waiting", {}, "…"));
  const element = el("li.turn", { "data-role": "assistant", "aria-busy": "true" }, body);
  let waiting = null;
  let isOpen = true; // thoughts are shown while there is nothing else, then folded
  function update(turn) {
    waiting ??= requestAnimationFrame(() => {
      waiting = null;
      isOpen = !turn.content;
      show(body, replied(turn, { isOpen }));
    });
  }
  return { element, update };
}

function asked(turn) {
  const label = turn.role === "tool" && el("p.note", {}, "Result of the tool");
  return [label, el("p.body", {}, turn.content)];
}

function replied({ content, thoughts, calls }, { answer, open = [], isOpen = false }) {
  return [
    thoughts &&
      el(
        "details.thoughts",
        { open: isOpen },
        el("summary", {}, "Thoughts"),
        el("p", {}, thoughts.trim()),
      ),
    content.trim() && el("div.body", {}, markdown(content.trim())),
    calls?.map((call) => called(call, open.includes(call) && answer)),
  ];
}

/** A call of a tool, and a field for its result where it still has none. */
function called(call, answer) {
  const { name, arguments: text } = call.function;
  const result = el("textarea", { rows: 2, "aria-label": `Result of ${name}` });
  return el(
    "div.call",
    {},
    el("p", {}, "Calls ", el("code", {}, name)),
    el("pre", { tabindex: "0" }, el("code", {}, indented(text))),
    answer && [
      result,
      el("button", { type: "button", onclick: () => answer(call, result.value) }, "Send the result"),
    ],
  );
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it was cut
  }
}
