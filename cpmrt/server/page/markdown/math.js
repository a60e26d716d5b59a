// Maths as MathML, by Temml, which is loaded when the first formula comes.

import { element } from "../dom.js";

const LONGEST = 4000;
const BUDGET_MS = 8;
const MOST_KNOWN = 500;
const SETTINGS = { throwOnError: true, trust: false, maxExpand: 300, maxSize: [40, 40] };

let temml = null;
let loading = null;
const waiting = [];
const known = new Map(); // formulas that were drawn before, as those of a paragraph that grows

/** Return an element with a formula: its source until Temml is there, and for good where Temml cannot read it. */
export function mathElement(tex, isDisplay) {
  const box = element(isDisplay ? "div" : "span", { class: isDisplay ? "math display" : "math" });
  box.append(element("code", { text: tex }));
  if (tex.length > LONGEST) return box;
  if (temml) draw(box, tex, isDisplay);
  else {
    waiting.push([box, tex, isDisplay]);
    loadTemml();
  }
  return box;
}

/** Load Temml, if that has not begun; returns when formulas that wait are being drawn. */
export function loadTemml() {
  return (loading ??= load());
}

async function load() {
  try {
    temml = (await import("../vendor/temml/temml.mjs")).default;
  } catch {
    return; // formulas stay readable as source
  }
  drawWaiting();
}

function drawWaiting() {
  const end = performance.now() + BUDGET_MS;
  while (waiting.length && performance.now() < end) draw(...waiting.shift());
  if (waiting.length) setTimeout(drawWaiting);
}

function draw(box, tex, displayMode) {
  const key = `${displayMode} ${tex}`;
  if (!known.has(key)) {
    if (known.size >= MOST_KNOWN) known.clear();
    known.set(key, rendered(tex, displayMode));
  }
  const drawn = known.get(key);
  if (drawn) box.replaceChildren(drawn.cloneNode(true));
}

/** Return the MathML of a formula, or null if Temml cannot read it. */
function rendered(tex, displayMode) {
  const box = document.createElement("span");
  try {
    temml.render(tex, box, { ...SETTINGS, displayMode });
  } catch {
    return null;
  }
  return box.firstChild;
}
