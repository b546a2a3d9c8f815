/** A panel: a form for one task of one model, what came of it, and the request that was sent. */

import { post } from "./api.js";
import { el, show } from "./dom.js";
import { snippets } from "./snippets.js";

/**
 * What a task's module gives to its panel.
 *
 * @typedef {object} Task
 * @property {string} title
 * @property {string} note one sentence on what it does
 * @property {{name: string, label: string, kind: "line"|"text"|"lines"|"number"|"range"|"choice",
 *   value: any, step?: number, min?: number, max?: number, options?: object[]}[]} fields `lines` is
 *   a list with one item per line, `range` a number chosen with a slider, `choice` one of `options`
 * @property {string} [clears] the field that is empty again once it was sent
 * @property {(values: object, model: string) => object} request see `snippets`
 * @property {(request: object) => Promise<object>} [send] where one request is not enough; see `post`
 * @property {(content: any, values: object) => Node} [render] what to show of the reply
 * @property {(request: object, out: Element, values: object) => {done: Promise<void>,
 *   stop: () => void}} [start] in place of `render`, for what streams
 */

/** Builds the panel of a task; `label` is how the model is named. */
export function panel(task, model) {
  const inputs = new Map(task.fields.map((field) => [field.name, control(field)]));
  const out = el(
    "div.out",
    { "aria-live": "polite" },
    el("p.hint", {}, "The answer appears here."),
  );
  const problem = el("p.error", { role: "alert", hidden: true });
  const times = el("p.times");
  const sent = el("div.sent");
  const button = el("button.primary", {}, task.verb ?? "Run");
  const form = el(
    "form.inputs",
    { onsubmit: submit, onkeydown: submitByKey },
    task.fields.map((field) =>
      el(
        "label.field",
        { "data-kind": field.kind },
        el("span", {}, field.label, field.kind === "range" && reading(inputs.get(field.name))),
        inputs.get(field.name),
      ),
    ),
    el("p.actions", {}, button, el("kbd", { "aria-hidden": "true" }, "Ctrl ⏎")),
    problem,
  );
  const element = el(
    "article.panel",
    { "data-task": task.name },
    el("header", {}, el("h3", {}, task.title), el("p", {}, task.note)),
    el("div.work", {}, form, el("div.result", {}, out, times)),
    sent,
  );
  let runner = null;

  function submitByKey(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  }

  async function submit(event) {
    event.preventDefault();
    runner?.stop();
    const values = Object.fromEntries(
      task.fields.map((field) => [field.name, read(field, inputs.get(field.name))]),
    );
    const request = task.request(values, model);
    show(sent, snippets(request));
    problem.hidden = true;
    button.disabled = true;
    element.setAttribute("aria-busy", "true");
    try {
      if (task.start) {
        show(times);
        runner = task.start(request, out, values);
        button.disabled = false;
        if (task.clears) inputs.get(task.clears).value = "";
        await runner.done;
      } else {
        const { content, headers, seconds } = await (task.send ?? single)(request);
        show(out, task.render(content, values));
        show(times, timings(headers, seconds));
      }
    } catch (error) {
      if (task.clears) inputs.get(task.clears).value = values[task.clears];
      show(problem, error.message);
      problem.hidden = false;
    } finally {
      button.disabled = false;
      element.removeAttribute("aria-busy");
    }
  }

  return element;
}

function single({ path, body }) {
  return post(path, body);
}

/** What the server's headers say of the time that a request took. */
function timings(headers, seconds) {
  const parts = [
    ["model", headers.get("x-inference-time")],
    ["queue", headers.get("x-queue-time")],
    ["server", headers.get("x-total-time")],
  ].filter(([, value]) => value !== null);
  const spans = parts.map(([name, value]) =>
    el("span", {}, `${name} ${Number(value).toFixed(1)} ms`),
  );
  return [el("span", {}, `${(seconds * 1e3).toFixed(0)} ms in this page`), ...spans];
}

function control({ kind, value, step, min, max, options }) {
  if (kind === "choice")
    return el(
      "select",
      {},
      options.map((each) => el("option", { value: each.value }, each.label)),
    );
  if (kind === "text" || kind === "lines") {
    const text = kind === "lines" ? value.join("\n") : value;
    const area = el("textarea", { rows: kind === "lines" ? Math.max(value.length, 3) : 3 });
    area.value = text;
    return area;
  }
  const type = kind === "number" || kind === "range" ? kind : "text";
  return el("input", { type, value, step, min, max });
}

/** What a slider is set to. */
function reading(input) {
  const output = el("b.reading", {}, input.value);
  input.addEventListener("input", () => show(output, input.value));
  return output;
}

function read({ kind }, input) {
  if (kind === "range") return Number(input.value);
  if (kind === "number") return input.value === "" ? undefined : Number(input.value);
  if (kind === "lines") return input.value.split("\n").filter((line) => line.trim() !== "");
  return input.value;
}

/** An object without what is undefined. */
export function given(values) {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
}
