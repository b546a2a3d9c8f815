/** API keys: asked for when the server wants one, and kept in this tab only. */

import { el, show } from "./dom.js";

/** A key, by what it is for: `ask` models, or `admin`. */
const NAMES = { ask: "maskdial-key", admin: "maskdial-admin-key" };
const TITLES = { ask: "This server asks for a key", admin: "This needs the admin key" };
const asking = {};

/** The header that carries the key, if there is one. */
export function authorization(kind = "ask") {
  const key = sessionStorage.getItem(NAMES[kind]);
  return key === null ? {} : { authorization: `Bearer ${key}` };
}

/**
 * Asks for a key, once however many requests need it.
 *
 * @param {string} reason the server's sentence
 * @param {"ask"|"admin"} kind what it is for
 * @returns {Promise<boolean>} whether there is a new one
 */
export function askForKey(reason, kind) {
  asking[kind] ??= ask(reason, kind).finally(() => {
    delete asking[kind];
  });
  return asking[kind];
}

function ask(reason, kind) {
  const input = el("input", {
    type: "password",
    name: "key",
    required: true,
    autocomplete: "off",
    "aria-label": "API key",
  });
  const form = el("form", { method: "dialog" });
  const dialog = el("dialog.key", { "aria-labelledby": "key-title" }, form);
  show(
    form,
    el("h2", { id: "key-title" }, TITLES[kind]),
    el("p.error", {}, reason),
    input,
    el("p.hint", {}, "It stays in this tab, and is forgotten when you close it."),
    el(
      "p.actions",
      {},
      el("button.primary", { value: "ok" }, "Use this key"), // the first one answers to Enter
      el("button", { value: "cancel", formnovalidate: true }, "Cancel"),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok" && input.value !== "";
      if (given) sessionStorage.setItem(NAMES[kind], input.value);
      dialog.remove();
      resolve(given);
    });
  });
}
