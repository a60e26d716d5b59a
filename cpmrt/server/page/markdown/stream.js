// An answer that grows, as elements. Only the block at the end is read again; blocks before it are never touched.

import { showBlocks } from "./blocks.js";
import { parseBlocks } from "./parser.js";

const SLICE = 1500;
const FIRST_LEVEL = 3;
const LAST_LEVEL = 6;

export class MarkdownStream {
  /** Show Markdown in `root`, whose headings belong below the heading of their message. */
  constructor(root) {
    this.root = root;
    this.waiting = "";
    this.tail = ""; // the source of the blocks that may still change
    this.open = []; // those blocks
    this.env = {};
    this.outline = []; // levels of the headings above the end
  }

  /** Take more of the text. */
  push(text) {
    this.waiting += text.replaceAll("\r", "");
  }

  /** Show a slice of what waits; returns whether more waits. */
  draw() {
    if (!this.waiting) return false;
    // A slice costs what the open block costs: long ones are drawn in fewer slices.
    const length = Math.max(SLICE, this.tail.length >> 2);
    this.tail += this.waiting.slice(0, length);
    this.waiting = this.waiting.slice(length);
    this.#advance();
    return this.waiting !== "";
  }

  #advance() {
    const blocks = parseBlocks(this.tail, this.env),
      outline = [...this.outline];
    for (const block of blocks) if (block.kind === "heading") place(block, outline);
    showBlocks(this.root, this.open, blocks, this.env);
    this.open = blocks;
    // More text can change the last block that has surely begun, and what stands behind it, but nothing before.
    const numWhole = this.tail.split("\n").length - 1;
    const first = blocks.findLastIndex(block => hasBegun(block, numWhole));
    if (first <= 0) return;
    for (const block of blocks.slice(0, first)) if (block.kind === "heading") place(block, this.outline);
    this.open = blocks.slice(first);
    let offset = 0;
    for (let line = 0; line < blocks[first].line; line++) offset = this.tail.indexOf("\n", offset) + 1;
    this.tail = this.tail.slice(offset);
  }
}

/** Return whether this block stays apart from the one before it, whatever line comes next or is completed. */
function hasBegun(block, numWhole) {
  if (block.kind === "math_block") return block.isClosed && block.end <= numWhole;
  return block.line + (block.kind === "table" ? 1 : 0) < numWhole;
}

/** Give a heading the level below the heading that it stands under, so that none is left out. */
function place(block, outline) {
  const level = Number(block.tag.slice(1));
  while (outline.at(-1) >= level) outline.pop();
  outline.push(level);
  block.heading = `h${Math.min(LAST_LEVEL, FIRST_LEVEL + outline.length - 1)}`;
  block.key = `heading ${block.heading}`;
}
