/** Text while it is generated: each token tinted by its surprisal, its alternatives on hover. */

import { stream } from "./api.js";
import { el, show } from "./dom.js";
import { bits, bitText, percent, shown, tint } from "./scale.js";

/** One generation, with its rates as this page measures them, and a button that stops it. */
export class Writer {
  constructor() {
    this.text = el("p.written", { "aria-live": "off" });
    this.rates = el("p.rates");
    this.verdicts = el("ul.verdicts", { "aria-label": "What policies found" });
    this.rivals = el("div.rivals", { role: "status" });
    this.problem = el("p.error", { role: "alert", hidden: true });
    this.button = el("button.stop", { type: "button", onclick: () => this.stop() }, "Stop");
    this.element = el(
      "div.writer",
      {},
      this.text,
      this.problem,
      el("div.below", {}, this.rates, this.button),
      this.verdicts,
      this.rivals,
    );
  }

  /** Ends the stream; the server frees its slot within one step. */
  stop() {
    this.controller?.abort();
  }

  /**
   * @param {string} prompt shown before the text
   * @param {object} body for `/generate_stream`
   * @param {string} [policy] that the request asks for
   */
  async run(prompt, body, policy) {
    this.controller = new AbortController();
    show(this.text, el("span.prompt", {}, prompt));
    this.begin();
    const headers = policy ? { "x-policy": policy } : {};
    try {
      for await (const event of stream("/generate_stream", body, this.controller.signal, headers))
        this.add(event);
      this.finish();
    } catch (error) {
      this.finish(error);
    }
  }

  begin() {
    this.started = performance.now();
    this.first = null;
    this.num = 0;
    this.button.hidden = false;
    this.element.dataset.state = "running";
    show(this.rates, "waiting for the first token…");
    show(this.verdicts);
  }

  add({ token, top_tokens: top, details }) {
    this.first ??= performance.now();
    this.num += 1;
    if (token.text) this.text.append(this.piece(token, top ?? []));
    if (details) this.end(details);
    this.showRates();
  }

  /** How the text ended, and what policies found in it and in the prompt. */
  end({ finish_reason: reason, policy = [] }) {
    this.reason = reason;
    show(
      this.verdicts,
      policy.map(({ rule, action, label, score, part }) =>
        el(
          "li",
          { "data-action": action },
          el("strong", {}, label),
          ` ${percent(score)}, ${part}: `,
          el("b", {}, action),
          ` by ${rule}`,
        ),
      ),
    );
  }

  piece(token, top) {
    const surprisal = bits(token.logprob);
    const look = () => this.showRivals(token, top);
    const piece = el(
      "span.piece",
      { tabindex: top.length ? "0" : null, onpointerenter: look, onfocus: look },
      token.text,
    );
    piece.title = `${percent(Math.exp(token.logprob))}, ${bitText(surprisal)}`;
    return tint(piece, surprisal);
  }

  showRivals(token, top) {
    if (!top.length) return;
    show(
      this.rivals,
      el("span", {}, "Instead of "),
      el("strong", {}, shown(token.text)),
      el("span", {}, ` (${percent(Math.exp(token.logprob))}): `),
      top.map((each) =>
        el(
          "span.rival",
          { "data-chosen": each.id === token.id },
          shown(each.text || "end"),
          " ",
          el("small", {}, percent(Math.exp(each.logprob))),
        ),
      ),
    );
  }

  showRates() {
    const waited = this.first - this.started;
    const running = (performance.now() - this.first) / 1e3;
    const rate = this.num > 1 ? `${((this.num - 1) / running).toFixed(0)} tokens/s` : "";
    show(
      this.rates,
      `${this.num} tokens`,
      el("span", {}, `first after ${waited.toFixed(0)} ms`),
      el("span", {}, rate),
    );
  }

  finish(error) {
    this.button.hidden = true;
    this.element.dataset.state = "done";
    if (error?.name === "AbortError") this.rates.append(el("span", {}, "stopped"));
    else if (error) {
      show(this.problem, error.message);
      this.problem.hidden = false;
      if (!this.num) show(this.rates);
    } else
      this.rates.append(
        el(
          "span",
          {},
          { length: "limit reached", eos_token: "the model ended it", stop_sequence: "stop text", content_filter: "ended by a policy" }[
            this.reason
          ] ?? "",
        ),
      );
  }
}
