/** The bench: every served model, and a panel for each of its tasks. */

import { el, show } from "./dom.js";
import { panel } from "./panel.js";
import { chat } from "./panels/chat.js";
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

/** Draws the section for the models and policies of `/info`. */
export function bench(section, models, policies) {
  const names = [...new Set(models.map((model) => model.name))];
  const place = el("div.bench-panel", { id: "bench-panel", role: "tabpanel" });
  const tabs = [];
  const groups = names.map((name) => {
    const versions = models.filter((model) => model.name === name);
    return el(
      "div.model",
      {},
      el("h3", {}, name),
      facts(versions),
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
      for (const each of tabs) each.setAttribute("aria-selected", String(each === button));
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
}

function tasksOf(versions, policies) {
  const found = [];
  for (const model of versions) {
    // Models that write canvases take none of the panels' settings
    if (model.tasks.includes("generate") && model.family !== "masked") {
      if (model.chat) found.push(chat());
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

function facts(versions) {
  const [{ architecture, precision, max_length, provider, state, reason }] = versions;
  const known = [architecture, precision, max_length && `${max_length} tokens`, provider];
  return [
    el("p.facts", {}, known.filter(Boolean).join(" · ")),
    state !== "ready" && el("p.facts", {}, reason || state),
  ];
}
