/** Prometheus' text format. */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})? ([^ ]+)/;

/**
 * The sum over all models of each metric.
 *
 * @param {string} text
 * @returns {Map<string, number>} by name
 */
export function sums(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const [, name, labels, value] = LINE.exec(line) ?? [];
    if (!name || labels?.includes("le=")) continue;
    found.set(name, (found.get(name) ?? 0) + Number(value));
  }
  return found;
}

/** The largest value of a metric over all models. */
export function largest(text, wanted) {
  const values = text
    .split("\n")
    .map((line) => LINE.exec(line))
    .filter((match) => match?.[1] === wanted);
  return Math.max(0, ...values.map((match) => Number(match[3])));
}
