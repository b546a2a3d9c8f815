/** A sentence whose words hang their surprisal below them, under either mask. */

import { el, show, styled } from "./dom.js";
import { bitText, bits, tint } from "./scale.js";

/** A run of tokens that is hidden and filled as one: a word, or a punctuation mark. */
class Word {
  constructor(start) {
    this.start = start; // in characters of the text
    this.text = "";
    this.tokens = []; // {index, text, causal, full}, bits
  }

  /** Where its letters begin and end, without the space before them. */
  get range() {
    const blank = this.text.length - this.text.trimStart().length;
    return [this.start + blank, this.start + this.text.length];
  }

  bits(mask) {
    const known = this.tokens.map((token) => token[mask]).filter((each) => each != null);
    return known.length ? known.reduce((sum, each) => sum + each, 0) : null;
  }
}

/**
 * The words of a text from its tokens under both masks, as `/score` gives them.
 *
 * @param {string} text
 * @param {{text: string, logprob: number|null}[]} causal
 * @param {{text: string, logprob: number|null}[]} full
 */
export function words(text, causal, full) {
  const found = [];
  let at = 0;
  causal.forEach((token, index) => {
    const start = Math.max(text.indexOf(token.text, at), at);
    const joins =
      index > 0 &&
      /^[\p{L}\p{N}'’]/u.test(token.text) &&
      /[\p{L}\p{N}'’]$/u.test(found.at(-1).text);
    if (!joins) found.push(new Word(start));
    const word = found.at(-1);
    word.text += token.text;
    word.tokens.push({
      index,
      text: token.text,
      causal: bits(token.logprob),
      full: bits(full[index]?.logprob),
    });
    at = start + token.text.length;
  });
  return found;
}

/** The words as buttons. */
export class Sentence {
  /**
   * @param {{choose: (word: Word) => void, look: (word: Word|null) => void}} listeners called for a
   *   click, and while a word is pointed at or focused
   */
  constructor(listeners) {
    this.listeners = listeners;
    this.element = el("div.sentence", {
      role: "group",
      "aria-label": "The sentence, word by word",
    });
    this.words = [];
  }

  draw(given) {
    this.words = given;
    this.buttons = given.map((word) => this.button(word));
    show(this.element, this.buttons);
  }

  /** Hangs the bars of a mask; the other mask's stay as outlines. */
  turn(mask) {
    const other = mask === "full" ? "causal" : "full";
    this.words.forEach((word, at) => {
      const button = this.buttons[at];
      const plural = bitText(word.bits(mask));
      button.setAttribute(
        "aria-label",
        `${word.text.trim()}: ${plural}; hide it and fill the blank`,
      );
      button.title = `${plural} under the ${mask} mask, ${bitText(word.bits(other))} under the ${other} one`;
      word.tokens.forEach((token, index) => {
        const element = button.children[index];
        tint(element, token[mask]);
        styled(element, "other", Math.min((token[other] ?? 0) / 12, 1));
      });
    });
  }

  /** Shows which word is chosen; null: none. */
  choose(chosen) {
    this.words.forEach((word, at) => {
      this.buttons[at].setAttribute("aria-pressed", String(word === chosen));
    });
  }

  button(word) {
    const look = () => this.listeners.look(word);
    const away = () => this.listeners.look(null);
    return el(
      "button.word",
      {
        type: "button",
        "aria-pressed": "false",
        "data-joined": !/^\s/.test(word.text) && word.start > 0,
        onclick: () => this.listeners.choose(word),
        onpointerenter: look,
        onpointerleave: away,
        onfocus: look,
        onblur: away,
      },
      word.tokens.map((token) =>
        el(
          "span.token",
          {},
          el("span.piece", {}, token.text.trim() || "·"),
          el("span.drop", {}, el("span.ghost"), el("span.bar")),
        ),
      ),
    );
  }
}
