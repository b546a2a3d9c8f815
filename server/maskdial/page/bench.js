/** The bench: every served model, and a panel for each of its tasks. */

import { administer, peek } from "./api.js";
import { el, show } from "./dom.js";
import { panel } from "./panel.js";
import { extract } from "./panels/extract.js";
import { fillMask } from "./panels/fill_mask.js";
import { generate } from "./panels/generate.js";
import { classify, zeroShot } from "./panels/labels.js";
import { score } from "./panels/score.js";
import { findEntities, questionAnswering, redact, tokenClassify } from "./panels/spans.js";
import { embed, rerank, similarity } from "./panels/texts.js";

const TASKS = new Map(
  [
    fillMask,
    classify,
    zeroShot,
    tokenClassify,
    extract,
    questionAnswering,
    rerank,
    similarity,
    embed,
  ].map((task) => [task.name, task]),
);

/**
 * Draws the section for the models and policies of `/info`.
 *
 * @returns {(models: object[]) => void} shows what has changed of these models
 */
export function bench(section, models, policies) {
  const names = [...new Set(models.map((model) => model.name))];
  const place = el("div.bench-panel", { id: "bench-panel", role: "tabpanel" });
  const tabs = [];
  const cards = new Map();
  const groups = names.map((name) => {
    const versions = models.filter((model) => model.name === name);
    const card = el("div");
    const drawn = drawing(card);
    drawn(versions);
    cards.set(name, drawn);
    return el(
      "div.model",
      {},
      el("h3", {}, name),
      card,
      versions.some(chats) && el("a.chat", { href: `#chat/${encodeURIComponent(name)}` }, "Chat"),
      el(
        "div.tasks",
        { role: "tablist", "aria-label": `Tasks of ${name}` },
        tasksOf(versions, policies).map((task) => tab(name, task)),
      ),
    );
  });
  show(
    section,
    el(
      "div.lead",
      {},
      el("h2", { id: "models-title" }, "What is served"),
      el(
        "p",
        {},
        "A panel for each task of each model. Every panel shows the request that it sent.",
      ),
    ),
    el("div.bench", {}, el("div.models", {}, groups), place),
  );

  function tab(name, task) {
    const id = `${name}/${task.name}`;
    let made = null; // panels keep what was typed into them
    const button = el(
      "button",
      {
        type: "button",
        role: "tab",
        "data-panel": id,
        "aria-controls": "bench-panel",
        "aria-selected": "false",
        onclick: select,
        onkeydown: (event) => step(event, button),
      },
      task.title,
    );
    tabs.push(button);
    function select() {
      for (const each of tabs) {
        each.setAttribute("aria-selected", String(each === button));
        each.tabIndex = each === button ? 0 : -1; // one stop for the whole list
      }
      made ??= panel(task, name);
      show(place, made);
    }
    return button;
  }

  /** Arrow keys go from tab to tab, as in all tab lists. */
  function step(event, button) {
    const by = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = tabs[(tabs.indexOf(button) + by + tabs.length) % tabs.length];
    next.focus();
    next.click();
  }
  tabs[0]?.click();
  return (found) => {
    for (const [name, drawn] of cards) {
      const versions = found.filter((model) => model.name === name);
      if (versions.length) drawn(versions);
    }
  };
}

/** Whether a model answers chats. */
export function chats(model) {
  return model.chat && model.tasks.includes("generate");
}

function tasksOf(versions, policies) {
  const found = [];
  for (const model of versions) {
    // Models that write canvases take none of the panels' settings
    if (model.tasks.includes("generate") && model.family !== "masked") {
      found.push(generate(model.generation_defaults, policies));
    }
    const any = !model.labels.length; // it has none of its own
    for (const name of model.tasks) {
      if (name === "redact") found.push(redact(any));
      else if (name === "token-classify" && any) found.push(findEntities);
      else if (TASKS.has(name)) found.push(TASKS.get(name));
    }
  }
  const scorer = versions.find((model) => model.tasks.includes("score"));
  if (scorer) found.push(score(scorer.mask));
  return found;
}

/** Draws the facts of a model if they have changed: its button keeps the focus, and what it said. */
function drawing(card) {
  let known = "";
  return function drawn(versions, anyway = false) {
    const told = JSON.stringify(versions);
    if (told === known && !anyway) return;
    known = told;
    show(card, facts(versions, drawn));
  };
}

function facts(versions, drawn) {
  const [{ name, architecture, precision, max_length, provider, state, reason }] = versions;
  const known = [architecture, precision, max_length && `${max_length} tokens`, provider];
  const said = el("p.facts", {}, reason || (state === "ready" ? "" : state));
  const isLoaded = state === "ready";
  const button = el("button.link", { type: "button" }, isLoaded ? "Unload" : "Load");
  button.addEventListener("click", async () => {
    button.disabled = true;
    show(said, isLoaded ? "unloading…" : "loading…");
    try {
      const reply = await administer(`/models/${isLoaded ? "unload" : "load"}`, { model: name });
      const { models } = await peek("/info");
      const now = models.filter((model) => model.name === name);
      drawn(now.length ? now : [{ ...versions[0], ...reply }], true);
    } catch (error) {
      show(said, error.message);
      button.disabled = false;
    }
  });
  const manages = ["ready", "unloaded", "failed"].includes(state);
  return [
    el("p.facts", {}, known.filter(Boolean).join(" · "), manages && [" · ", button]),
    said,
  ];
}
