// Elements are made here, and HTML is parsed nowhere: every text of a model or a person becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

/** Return the element of index.html with this id. */
export const byId = id => document.getElementById(id);

/**
 * Make an element. `properties` are attributes, but for `on...`, which are listeners, and `text`, the text in it.
 * Attributes that are null, undefined or false are left out.
 */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "text") made.textContent = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

/** Return a picture out of the symbols in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg"),
    use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** Return a button that shows a picture; `label` is its name for a tooltip and for screen readers. */
export function iconButton(name, label, onclick, properties = {}) {
  return element(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...properties },
    icon(name),
  );
}
