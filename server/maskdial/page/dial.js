/** The dial: one model reads the same sentence under either mask; its words can be hidden and cut. */

import { post } from "./api.js";
import { Blank } from "./blank.js";
import { el, show, styled } from "./dom.js";
import { knob } from "./knob.js";
import { Matrix } from "./matrix.js";
import { Sentence, words } from "./sentence.js";

const EXAMPLES = [
  "The captain of the ship looked at the sea and said nothing.",
  "She took the key from her pocket and opened the door.",
  "The baby began to cry, and her mother took her in her arms.",
];

/** The section with the dial, for a model that is served under both masks. */
export class Dial {
  constructor(section, model) {
    this.model = model;
    this.mask = "causal";
    this.section = section;
    this.matrix = new Matrix();
    this.sentence = new Sentence({
      choose: (word) => this.fill(word),
      look: (word) => this.matrix.mark(word && word.tokens[0].index),
    });
    this.sum = el("p.sum", { "aria-live": "polite" });
    this.totals = el("div.totals");
    this.blank = new Blank(model, (text) => this.choose(text));
    this.problem = el("p.error", { role: "alert", hidden: true });
    this.input = el("input", {
      name: "sentence",
      value: EXAMPLES[0],
      "aria-label": "A sentence to read",
      maxlength: 400,
      autocomplete: "off",
    });
    this.build();
  }

  build() {
    const form = el(
      "form.try",
      { onsubmit: (event) => this.submit(event) },
      this.input,
      el("button.primary", {}, "Read it"),
      this.problem,
      el(
        "p.examples",
        {},
        "Or: ",
        EXAMPLES.slice(1).map((each) => this.example(each)),
      ),
    );
    show(
      this.section,
      el(
        "div.lead",
        {},
        el("h1", { id: "dial-title" }, "One model, two ways to read"),
        el(
          "p",
          {},
          "Below each word hangs its surprisal: how many bits it takes to guess it. ",
          `Turn the dial, and ${this.model} may also look to the right. Click a word to hide it.`,
        ),
      ),
      el(
        "div.reader",
        {},
        el("div.text", {}, this.sentence.element, legend(), this.sum, this.totals, form),
        el(
          "div.side",
          {},
          knob(this.mask, (mask) => this.turn(mask)),
          this.matrix.element,
        ),
      ),
      this.blank.element,
    );
  }

  example(text) {
    return el("button.link", { type: "button", onclick: () => this.choose(text) }, text);
  }

  /** Reads a text that was not typed. */
  choose(text) {
    this.input.value = text;
    return this.read(text);
  }

  submit(event) {
    event.preventDefault();
    this.read(this.input.value);
  }

  /** Reads the first example. */
  start() {
    return this.read(EXAMPLES[0]);
  }

  /** Scores a text under both masks and draws it. */
  async read(text) {
    this.blank.close();
    this.reading?.abort();
    const { signal } = (this.reading = new AbortController());
    const score = (mask) => post("/score", { inputs: text, model: this.model, mask }, signal);
    try {
      const [causal, full] = await Promise.all([score("causal"), score("full")]);
      this.text = text;
      this.scores = { causal: causal.content[0], full: full.content[0] };
      this.problem.hidden = true;
      this.draw();
    } catch (error) {
      this.fail(error);
    }
  }

  draw() {
    const { causal, full } = this.scores;
    this.sentence.draw(words(this.text, causal.tokens, full.tokens));
    this.matrix.draw(causal.tokens.length);
    // The bars grow from where they are drawn first.
    requestAnimationFrame(() => this.turn(this.mask));
    this.turn(this.mask);
  }

  /** Turns to a mask. */
  turn(mask) {
    this.mask = mask;
    this.section.dataset.mask = mask;
    if (!this.scores) return;
    this.sentence.turn(mask);
    this.matrix.turn(mask);
    const total = (each) => -this.scores[each].log_likelihood / Math.LN2;
    const saved = total("causal") - total("full");
    const worth =
      saved >= 0 ? `is worth ${saved.toFixed(1)} bits` : `costs ${(-saved).toFixed(1)} bits`;
    show(this.sum, "Here, the context on the right ", el("strong", {}, worth), ".");
    const most = Math.max(total("causal"), total("full"));
    show(
      this.totals,
      ["causal", "full"].map((each) =>
        el(
          "div.total",
          { "data-mask": each, "aria-current": String(each === mask) },
          el("span", {}, each),
          styled(el("span.track", {}, el("span.fill")), "share", total(each) / most),
          el("span.number", {}, `${total(each).toFixed(1)} bits`),
        ),
      ),
    );
  }

  /** Hides a word and asks the model for it. */
  async fill(word) {
    this.sentence.choose(word);
    try {
      await this.blank.open(this.text, ...word.range);
      this.problem.hidden = true;
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    if (error.name === "AbortError") return; // something else was asked for meanwhile
    show(this.problem, error.message);
    this.problem.hidden = false;
  }
}

function legend() {
  return el(
    "p.legend",
    {},
    el("span", {}, el("i.few"), el("i.some"), el("i.many"), "0 to 12 bits"),
    el("span", {}, el("i.outline"), "under the other mask"),
  );
}
