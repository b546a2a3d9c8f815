/** The server's load, from `/metrics`, once a second while it can be seen. */

import { getText } from "./api.js";
import { Chart } from "./chart.js";
import { el, show } from "./dom.js";
import { largest, sums } from "./prometheus.js";

const whole = (value) => value.toFixed(0);
const share = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)}%`;

/** Draws the section and keeps it up to date. */
export function load(section) {
  const charts = {
    running: new Chart("Requests running", whole, 4),
    waiting: new Chart("Requests waiting", whole, 4),
    written: new Chart("Tokens written per second", whole, 10),
    read: new Chart("Tokens read per second", whole, 10),
    cache: new Chart("KV cache in use", share, 0.05),
    padding: new Chart("Padding in batches", share, 0.1),
  };
  const problem = el("p.error", { role: "alert", hidden: true });
  show(
    section,
    el(
      "div.lead",
      {},
      el("h2", { id: "load-title" }, "Load"),
      el(
        "p",
        {},
        "All models together, over the last minute, from ",
        el("a", { href: "metrics" }, "/metrics"),
        ".",
      ),
    ),
    problem,
    el(
      "div.charts",
      {},
      Object.values(charts).map((chart) => chart.element),
    ),
  );
  let before = null;
  let visible = false;
  new IntersectionObserver(([entry]) => {
    visible = entry.isIntersecting;
  }).observe(section);

  async function step() {
    if (!visible || document.hidden) return;
    try {
      const text = await getText("/metrics");
      const now = {
        at: performance.now(),
        found: sums(text),
        cache: largest(text, "maskdial_kv_cache_usage_ratio"),
      };
      update(charts, before, now);
      before = now;
      problem.hidden = true;
    } catch (error) {
      show(problem, error.message);
      problem.hidden = false;
      before = null;
    }
  }
  const repeat = () => step().finally(() => setTimeout(repeat, 1000));
  repeat();
}

function update(charts, before, now) {
  const value = (name) => now.found.get(`maskdial_${name}`) ?? 0;
  const gained = (name) => value(name) - (before?.found.get(`maskdial_${name}`) ?? value(name));
  const seconds = before ? (now.at - before.at) / 1e3 : 1;
  charts.running.add(value("requests_running"));
  charts.waiting.add(value("queue_size"));
  charts.written.add(gained("generation_tokens_total") / seconds);
  charts.read.add(gained("prompt_tokens_total") / seconds);
  charts.cache.add(now.cache);
  const passes = gained("padding_ratio_count");
  // The metric is padded over valid tokens; shown is the padding's share of all.
  charts.padding.add(passes ? 1 - passes / gained("padding_ratio_sum") : null);
}
