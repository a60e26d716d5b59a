// Blocks as elements. Blocks that did not change keep their elements; a block that grew changes only in its last parts.

import { element } from "../dom.js";
import { CodeBlock } from "./code_block.js";
import { showInline } from "./inline.js";
import { mathElement } from "./math.js";

const CONTAINERS = new Set(["blockquote", "bullet_list", "ordered_list", "list_item", "table", "thead", "tbody", "tr"]);

/**
 * Show the blocks `after` in `box`, where the blocks `before` stand at the end. Every block of `after` gets the element
 * that shows it as `dom`. `env` is that of the parser.
 */
export function showBlocks(box, before, after, env) {
  after.forEach((block, index) => {
    const old = before[index];
    if (old?.key === block.key) {
      grow(block, old, env);
    } else {
      build(block, env);
      if (old) old.dom.replaceWith(block.dom);
      else box.append(block.dom);
    }
  });
  for (const gone of before.slice(after.length)) gone.dom.remove();
}

function build(block, env) {
  if (block.kind === "fence" || block.kind === "code_block") {
    block.code = new CodeBlock(block.info ?? "");
    block.dom = block.code.dom;
    block.code.update(block.text.replace(/\n$/, ""));
  } else if (block.kind === "math_block") {
    block.dom = formula(block);
  } else if (CONTAINERS.has(block.kind)) {
    block.box = container(block);
    block.dom = block.kind === "table" ? scrolled(block.box) : block.box;
    showBlocks(block.box, [], block.children, env);
  } else {
    block.dom = element(tagOf(block), classOf(block));
    if (block.text) showInline(block.dom, block.text, env);
  }
}

function grow(block, old, env) {
  Object.assign(block, { dom: old.dom, box: old.box, code: old.code });
  if (CONTAINERS.has(block.kind)) {
    showBlocks(block.box, old.children, block.children, env);
  } else if (block.text !== old.text || block.isClosed !== old.isClosed) {
    if (block.code) block.code.update(block.text.replace(/\n$/, ""));
    else if (block.kind === "math_block") old.dom.replaceWith((block.dom = formula(block)));
    else showInline(block.dom, block.text, env);
  }
}

function formula(block) {
  return block.isClosed
    ? mathElement(block.text, true)
    : element("div", { class: "math display" }, element("code", { text: block.text }));
}

function container(block) {
  return element(block.tag, { start: block.start });
}

/** Let a wide table scroll by itself, with the keyboard too. */
function scrolled(table) {
  return element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, table);
}

/** Headings within lists and quotes have no place in the outline. */
function tagOf(block) {
  return block.kind === "heading" ? (block.heading ?? "p") : block.tag || "p";
}

function classOf(block) {
  if (block.kind === "heading") return { class: "heading" };
  return { class: block.isTight ? "tight" : block.align ? `align-${block.align}` : null };
}
