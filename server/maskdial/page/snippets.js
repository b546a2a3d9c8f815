/** The request that was sent, as curl, for the Python client and for the OpenAI SDK, to copy. */

import { address } from "./api.js";
import { el, show } from "./dom.js";
import { authorization } from "./key.js";

const VARIABLE = "MASKDIAL_API_KEY"; // where the key is expected
const IN_PYTHON = `os.environ["${VARIABLE}"]`;
const LONG = 84; // characters; a longer body is written on several lines

/**
 * @param {{path: string, body: object, python: string, openai?: string, streams?: boolean, policy?: string}} request
 *   `python` and `openai` are calls of `client`; `policy` is asked for by a header
 * @param {boolean} [open] whether it is shown at once
 */
export function snippets(request, open = true) {
  const texts = [
    ["curl", curl(request)],
    ["Python", python(request)],
    ...(request.openai ? [["OpenAI SDK", openai(request)]] : []),
  ];
  const code = el("code");
  const copy = el("button.copy", { type: "button", onclick: () => copied(copy, code) }, "Copy");
  const tabs = texts.map(([name, text]) =>
    el("button", { type: "button", role: "tab", onclick: () => select(name, text) }, name),
  );
  function select(name, text) {
    for (const tab of tabs) tab.setAttribute("aria-selected", String(tab.textContent === name));
    show(code, text);
    show(copy, "Copy");
  }
  select(...texts[0]);
  return el(
    "details.request",
    { open },
    el("summary", {}, "The request, to copy"),
    el(
      "div.tabs",
      {},
      el("div", { role: "tablist", "aria-label": "Form of the request" }, tabs),
      copy,
    ),
    el("pre", { tabindex: "0" }, code),
  );
}

/** A value as Python writes it. */
export function py(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value == null) return "None";
  if (Array.isArray(value)) return `[${value.map(py).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value)
      .map(([key, each]) => `${py(key)}: ${py(each)}`)
      .join(", ")}}`;
  }
  return json(value);
}

/** JSON without characters that edit the line where a terminal takes them for keys, as delete. */
function json(value, indent) {
  return JSON.stringify(value, null, indent).replace(
    /[\x7f-\x9f]/g,
    (each) => `\\u00${each.charCodeAt(0).toString(16)}`,
  );
}

/** Keyword arguments. */
export function keywords(values) {
  return Object.entries(values)
    .map(([key, value]) => `${key}=${py(value)}`)
    .join(", ");
}

function curl({ path, body, streams, policy }) {
  const line = json(body);
  const data = (line.length > LONG ? json(body, 2) : line).replaceAll("'", "'\\''");
  const key = hasKey() ? ` \\\n  -H "Authorization: Bearer $${VARIABLE}"` : "";
  const asked = policy ? ` \\\n  -H "x-policy: ${policy}"` : "";
  return `curl ${streams ? "-N " : ""}${address(path)}${key}${asked} \\\n  -d '${data}'`;
}

function python({ python: call, policy }) {
  const [imports, key] = hasKey() ? ["import os\n\n", `, api_key=${IN_PYTHON}`] : ["", ""];
  const asked = policy ? `, policy=${py(policy)}` : "";
  const client = `with Client(${py(root())}${key}${asked}) as client:`;
  return `${imports}from maskdial_client import Client\n\n${client}\n${indented(call)}`;
}

function openai({ openai: call }) {
  const [imports, key] = hasKey() ? ["import os\n\n", IN_PYTHON] : ["", py("none")];
  const client = `client = openai.OpenAI(base_url=${py(`${root()}/v1`)}, api_key=${key})`;
  return `${imports}import openai\n\n${client}\n${call}`;
}

/** Whether the server asked for a key, which is not written down here. */
function hasKey() {
  return "authorization" in authorization();
}

function root() {
  return address("").replace(/\/$/, "");
}

function indented(text) {
  return text
    .split("\n")
    .map((line) => `    ${line}`)
    .join("\n");
}

async function copied(button, code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    show(button, "Copied");
  } catch {
    // Browsers offer the clipboard on secure origins only.
    getSelection().selectAllChildren(code);
    show(button, "Selected");
  }
}
