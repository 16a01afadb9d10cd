/** @file Making and changing elements. Text is always text: nothing here parses HTML. */

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * An element with attributes and children.
 *
 * @param {string} tag with classes, as "div.card.wide"
 * @param {Record<string, any> | null} [attributes] "on…" are listeners; `dataset`, `style` objects (set through the
 *   object model, which a strict content policy allows); true is an empty attribute; false and null are left out
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  apply(element, attributes ?? {});
  append(element, children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** As `h`, for SVG. @param {string} name @param {Record<string, any>} attributes @param {...Node} children @returns {SVGElement} */
export function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  element.append(...children);
  return element;
}

/** @param {HTMLElement} element @param {Record<string, any>} attributes */
function apply(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "dataset") Object.assign(element.dataset, value);
    else if (key === "style") setStyle(element, value);
    else if (key === "value") /** @type {HTMLInputElement} */ (element).value = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
}

/** @param {HTMLElement} element @param {Record<string, string>} style */
function setStyle(element, style) {
  for (const [key, value] of Object.entries(style)) element.style.setProperty(key, value);
}

/** @param {HTMLElement} element @param {(Child | Child[])[]} children */
function append(element, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** Exchange an element's children. @param {HTMLElement} element @param {...(Child | Child[])} children */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** Write a text, if it is another one. @param {Element} element @param {string} text */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make a parent's children those of a list, keeping the elements of keys that stay: focus and selection survive.
 *
 * @template T
 * @param {HTMLElement} parent
 * @param {readonly T[]} items
 * @param {(item: T) => string} key different for all items
 * @param {(item: T) => HTMLElement} make
 * @param {(element: HTMLElement, item: T) => void} update also called for new ones
 */
export function keyed(parent, items, key, make, update) {
  const old = new Map();
  for (const child of parent.children) old.set(/** @type {HTMLElement} */ (child).dataset.key, child);
  /** @type {Element | null} */
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let element = old.get(name);
    if (element) old.delete(name);
    else {
      element = make(item);
      element.dataset.key = name;
    }
    if (place && element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update(element, item);
  }
  for (const element of old.values()) element.remove();
}

/** The element with this id, which is in the page. @param {string} id @returns {any} */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`no #${id}`);
  return element;
}
