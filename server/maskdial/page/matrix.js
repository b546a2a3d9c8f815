/** The attention mask as a matrix: rows are tokens that read, filled cells what each may see. */

import { el, show, svg } from "./dom.js";

const MOST_TOKENS = 64; // beyond that, cells are too small to be told apart

/** A drawing whose upper triangle appears under the full mask. */
export class Matrix {
  constructor() {
    this.drawing = svg("svg.matrix", { role: "img" });
    this.caption = el("figcaption");
    this.element = el("figure.mask", {}, this.drawing, this.caption);
  }

  /** Draws the mask of so many tokens. */
  draw(numTokens) {
    this.size = Math.min(numTokens, MOST_TOKENS);
    const size = this.size;
    this.drawing.setAttribute("viewBox", `-0.5 -0.5 ${size + 0.5} ${size + 0.5}`);
    this.row = svg("rect.reading", {
      x: -0.3,
      width: size + 0.1,
      height: 0.9,
      visibility: "hidden",
    });
    show(
      this.drawing,
      svg("path.left", { d: cells(size, (row, column) => column <= row) }),
      svg("path.right", { d: cells(size, (row, column) => column > row) }),
      this.row,
    );
    this.note = numTokens > size ? ` The first ${size} of ${numTokens} tokens.` : "";
  }

  /** Turns to a mask; see `Dial`. */
  turn(mask) {
    this.drawing.dataset.mask = mask;
    const sees = mask === "full" ? "every token" : "itself and what is to its left";
    this.drawing.setAttribute("aria-label", `${mask} mask: each token sees ${sees}`);
    show(
      this.caption,
      `Each row is a token; the filled cells are what it sees: ${sees}.${this.note}`,
    );
  }

  /** Marks the row of a token; null marks none. */
  mark(index) {
    const visible = index != null && index < this.size;
    this.row.setAttribute("visibility", visible ? "visible" : "hidden");
    if (visible) this.row.setAttribute("y", index - 0.05);
  }
}

function cells(size, filled) {
  let path = "";
  for (let row = 0; row < size; row++) {
    for (let column = 0; column < size; column++) {
      if (filled(row, column)) path += `M${column} ${row}h.8v.8h-.8z`;
    }
  }
  return path;
}
