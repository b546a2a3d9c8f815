/** The API key: asked for when the server wants one, and kept in this tab only. */

import { el, show } from "./dom.js";

const NAME = "maskdial-key";
let asking = null;

/** The header that carries the key, if there is one. */
export function authorization() {
  const key = sessionStorage.getItem(NAME);
  return key === null ? {} : { authorization: `Bearer ${key}` };
}

/**
 * Asks for the key, once however many requests need it.
 *
 * @param {string} reason the server's sentence
 * @returns {Promise<boolean>} whether there is a new one
 */
export function askForKey(reason) {
  asking ??= ask(reason).finally(() => {
    asking = null;
  });
  return asking;
}

function ask(reason) {
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
    el("h2", { id: "key-title" }, "This server asks for a key"),
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
      if (given) sessionStorage.setItem(NAME, input.value);
      dialog.remove();
      resolve(given);
    });
  });
}
