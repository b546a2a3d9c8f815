/** Starts the page: what the server says of itself decides what is shown. */

import { get, peek } from "./api.js";
import { bench, chats } from "./bench.js";
import { Chat } from "./chat/view.js";
import { Dial } from "./dial.js";
import { el, show } from "./dom.js";
import { load } from "./load.js";

const SECONDS = 10; // between two looks whether the server is there
const status = document.getElementById("status");
const sections = Object.fromEntries(
  ["chat", "dial", "models", "load"].map((id) => [id, document.getElementById(id)]),
);

/** The name of a model that is served under both masks and can score texts under both. */
function dialed(models) {
  const under = (mask) =>
    models.filter((model) => model.mask === mask && model.tasks.includes("score"));
  const causal = new Set(under("causal").map((model) => model.name));
  return under("full").find((model) => causal.has(model.name))?.name;
}

async function info() {
  for (;;) {
    const found = await get("/info");
    if (found.phase !== "loading") return found;
    show(status, "loading models…");
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
}

function showStatus({ version, models }) {
  const ready = new Set(models.filter((model) => model.ready).map((model) => model.name)).size;
  show(status, el("span.dot"), `${version} · ${ready} ${ready === 1 ? "model" : "models"} ready`);
  status.removeAttribute("data-gone");
}

/** Looks from time to time whether what the page says of the server still holds. */
function watch(update) {
  setInterval(async () => {
    if (document.hidden) return;
    try {
      const found = await peek("/info");
      showStatus(found);
      update(found.models);
    } catch (error) {
      show(status, el("span.dot"), error.message);
      status.setAttribute("data-gone", "");
    }
  }, SECONDS * 1e3);
}

/** Shows the chat or all else, by the address: `#chat`, or `#chat/MODEL`. */
function route(chat, isFirst) {
  const [view, model] = location.hash.slice(1).split("/");
  const isChat = view === "chat" || (view === "" && isFirst);
  document.body.dataset.view = isChat ? "chat" : "bench";
  for (const [id, section] of Object.entries(sections)) section.hidden = (id === "chat") !== isChat;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${isChat ? "chat" : view}`)
      link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (isChat) chat.enter(model && decoded(model));
  if (!isChat && view) document.getElementById(view)?.scrollIntoView();
}

/** A part of the address; one that is not encoded, as it is. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function start() {
  show(status, "connecting…");
  try {
    const found = await info();
    const { models, policies } = found;
    showStatus(found);
    const dial = dialed(models);
    if (dial) new Dial(sections.dial, dial).start();
    else {
      sections.dial.remove();
      delete sections.dial;
      document.querySelector('nav [href="#dial"]').remove();
    }
    const update = bench(sections.models, models, policies);
    load(sections.load);
    const names = [...new Set(models.filter(chats).map((model) => model.name))];
    if (names.length) {
      const chat = new Chat(sections.chat, names);
      // A server of one's own model is there to chat with; the starters show the dial first.
      addEventListener("hashchange", () => route(chat, !dial));
      route(chat, !dial);
    } else document.querySelector('nav [href="#chat"]').remove();
    watch(update);
  } catch (error) {
    show(status);
    show(sections.models, el("p.error", { role: "alert" }, error.message));
  }
}

start();
