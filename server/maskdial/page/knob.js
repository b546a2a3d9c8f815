/** The dial itself: a knob with two stops, which are radio buttons for keyboards and readers. */

import { el, svg } from "./dom.js";

const STOPS = [
  ["causal", "Causal", "sees the left"],
  ["full", "Full", "sees both sides"],
];

/**
 * @param {"causal"|"full"} mask where it stands
 * @param {(mask: string) => void} turn called when it is turned
 */
export function knob(mask, turn) {
  const radios = STOPS.map(([value, name, hint]) =>
    el(
      "label",
      {},
      el("input", {
        type: "radio",
        name: "mask",
        value,
        checked: value === mask,
        onchange: () => set(value),
      }),
      el("span", {}, el("strong", {}, name), el("small", {}, hint)),
    ),
  );
  const face = svg(
    "svg.face",
    { viewBox: "-50 -50 100 100", "aria-hidden": "true", onclick: () => set(other()) },
    svg("path.arc", { d: "M-38.1 -22A44 44 0 0 1 38.1 -22", pathLength: 1 }),
    ticks(),
    svg("circle.body", { r: 32 }),
    svg("path.pointer", { d: "M0 -6V-25" }),
  );
  const element = el(
    "fieldset.knob",
    { "data-mask": mask },
    el("legend", {}, "Attention mask"),
    radios[0],
    face,
    radios[1],
  );
  function other() {
    return element.dataset.mask === "full" ? "causal" : "full";
  }
  function set(value) {
    element.dataset.mask = value;
    for (const label of radios) label.firstChild.checked = label.firstChild.value === value;
    turn(value);
  }
  return element;
}

function ticks() {
  const angles = Array.from({ length: 7 }, (_, index) => -60 + index * 20);
  return angles.map((angle) =>
    svg("path.tick", { d: "M0 -36V-39", transform: `rotate(${angle})` }),
  );
}
