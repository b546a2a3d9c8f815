/** A small chart of one figure over the last minute. */

import { el, show, svg } from "./dom.js";

const POINTS = 60;

export class Chart {
  /**
   * @param {string} title
   * @param {(value: number) => string} write how a value is written
   * @param {number} [most] the top of the chart, at least
   */
  constructor(title, write, most = 1) {
    this.write = write;
    this.most = most;
    this.values = [];
    this.line = svg("path.line");
    this.area = svg("path.area");
    this.now = el("span.now", {}, "–");
    this.top = el("span.scale");
    this.element = el(
      "figure.chart",
      {},
      el("figcaption", {}, title),
      this.now,
      svg(
        "svg",
        { viewBox: `0 0 ${POINTS - 1} 30`, preserveAspectRatio: "none", "aria-hidden": "true" },
        this.area,
        this.line,
      ),
      this.top,
    );
  }

  /** Adds the next second's value; null if there is none. */
  add(value) {
    this.values = [...this.values, value].slice(-POINTS);
    show(this.now, value == null ? "–" : this.write(value));
    const known = this.values.filter((each) => each != null);
    const top = Math.max(this.most, ...known);
    show(this.top, this.write(top));
    const start = POINTS - this.values.length;
    let path = "";
    this.values.forEach((each, index) => {
      const y = (29 - ((each ?? 0) / top) * 27).toFixed(2);
      path += `${index ? "L" : "M"}${start + index} ${y}`;
    });
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", `${path}L${POINTS - 1} 30L${start} 30Z`);
  }
}
