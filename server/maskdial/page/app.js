/** Starts the page: what the server says of itself decides what is shown. */

import { get } from "./api.js";
import { bench } from "./bench.js";
import { Dial } from "./dial.js";
import { el, show } from "./dom.js";
import { load } from "./load.js";

const status = document.getElementById("status");
const sections = Object.fromEntries(
  ["dial", "models", "load"].map((id) => [id, document.getElementById(id)]),
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

async function start() {
  show(status, "connecting…");
  try {
    const { version, models, policies } = await info();
    const ready = new Set(models.filter((model) => model.ready).map((model) => model.name)).size;
    show(status, el("span.dot"), `${version} · ${ready} ${ready === 1 ? "model" : "models"} ready`);
    const name = dialed(models);
    if (name) new Dial(sections.dial, name).start();
    else sections.dial.remove();
    bench(sections.models, models, policies);
    load(sections.load);
  } catch (error) {
    show(status);
    show(sections.dial, el("p.error", { role: "alert" }, error.message));
  }
}

start();
