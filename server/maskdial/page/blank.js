/** A hidden word: what the model would fill in, and how it would write on from there. */

import { post } from "./api.js";
import { bars } from "./bars.js";
import { el, show } from "./dom.js";
import { shown } from "./scale.js";
import { py, snippets } from "./snippets.js";
import { Writer } from "./writer.js";

const BLANK = "[MASK]";
const CANDIDATES = 6;
const NEW_TOKENS = 60;

export class Blank {
  /**
   * @param {string} model
   * @param {(text: string) => void} replace called with the sentence that has a candidate in it
   */
  constructor(model, replace) {
    this.model = model;
    this.replace = replace;
    this.element = el("div.detail", { "aria-live": "polite" });
  }

  close() {
    this.asking?.abort();
    this.writer?.stop();
    show(this.element);
  }

  /**
   * Hides a part of a text and asks the model for it.
   *
   * @throws {ApiError} the server's
   */
  async open(text, start, end) {
    this.asking?.abort();
    this.writer?.stop();
    const { signal } = (this.asking = new AbortController());
    const [before, hidden, after] = [text.slice(0, start), text.slice(start, end), text.slice(end)];
    const body = {
      inputs: before + BLANK + after,
      model: this.model,
      parameters: { top_k: CANDIDATES },
    };
    const { content } = await post("/fill-mask", body, signal);
    // A text with blanks of its own has a list for each.
    const fills = Array.isArray(content[0]) ? content[before.split(BLANK).length - 1] : content;
    const filling = this.filling(before, fills, after);
    show(this.element, filling, this.cut(before + hidden, hidden), this.request(body));
    filling.scrollIntoView({ block: "nearest" });
  }

  filling(before, fills, after) {
    const found = fills.map((fill) => ({ ...fill, label: shown(fill.token_str) }));
    const blank = el("span.blank", { role: "img", "aria-label": "blank" });
    return el(
      "div.fill",
      {},
      el("h2", {}, "What was under the blank?"),
      el("p.blanked", {}, before, blank, after),
      bars(found, (item) => this.replace(item.sequence)),
      el("p.hint", {}, "Choose one to read the sentence with it."),
    );
  }

  cut(prompt, hidden) {
    const place = el("div.write");
    const write = () => this.write(prompt, place);
    return el(
      "div.cut",
      {},
      el("h2", {}, "Or cut here, and write on"),
      el("button", { type: "button", onclick: write }, `Cut after “${hidden}”`),
      place,
    );
  }

  request(body) {
    const call = `client.fill_mask(${py(body.inputs)}, model=${py(this.model)}, top_k=${CANDIDATES})`;
    return snippets({ path: "/fill-mask", body, python: `print(${call}.masks)` }, false);
  }

  /** Goes on from a text, under the causal mask. */
  write(prompt, place) {
    this.writer?.stop();
    this.writer = new Writer();
    show(place, this.writer.element);
    const parameters = { max_new_tokens: NEW_TOKENS, top_n_tokens: 5 };
    this.writer.run(prompt, { inputs: prompt, model: this.model, parameters });
  }
}
