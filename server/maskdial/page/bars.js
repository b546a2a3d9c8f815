/** Bars: candidates with their shares, as a list that reads without its colors. */

import { el, styled } from "./dom.js";
import { percent } from "./scale.js";

/**
 * @param {{label: string, score: number, text?: string}[]} items best first; scores from 0 to 1, or
 *   with a `text` that says them
 * @param {(item: object) => void} [choose] makes each a button
 */
export function bars(items, choose) {
  const most = Math.max(...items.map((item) => Math.abs(item.score)), 1e-9);
  return el(
    "ol.bars",
    {},
    items.map((item) => {
      const inside = [
        el("span.bar-label", {}, item.label),
        styled(el("span.bar-track", {}, el("span.bar-fill")), "share", Math.abs(item.score) / most),
        el("span.bar-value", {}, item.text ?? percent(item.score)),
      ];
      if (!choose) return el("li", {}, el("div.bar", {}, inside));
      const button = el("button.bar", { type: "button", onclick: () => choose(item) }, inside);
      return el("li", {}, button);
    }),
  );
}
