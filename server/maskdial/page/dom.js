/** Elements: built from nodes and strings, never from markup, so that no text can become an element. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element.
 *
 * @param {string} tag its name, with classes after dots: "button.primary"
 * @param {object} properties attributes; functions named onclick and so on are listeners
 * @param {...(Node|string|number|null|undefined|Array)} children strings become text
 */
export function el(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElement(name), classes, properties, children);
}

/** An SVG element; see `el`. */
export function svg(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElementNS(SVG, name), classes, properties, children);
}

/** Replaces what an element contains. */
export function show(parent, ...children) {
  parent.replaceChildren(...flat(children));
  return parent;
}

/** Sets a custom property of a style sheet on an element. */
export function styled(element, name, value) {
  element.style.setProperty(`--${name}`, String(value));
  return element;
}

function fill(element, classes, properties, children) {
  if (classes.length) element.classList.add(...classes);
  for (const [key, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, String(value));
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children
    .flat(Infinity)
    .filter((child) => child != null && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}
