// The words of a block: emphasis, code, links and maths, as elements.

import { element } from "../dom.js";
import { mathElement } from "./math.js";
import { parseInline } from "./parser.js";

const LONGEST = 12000;
const TAGS = new Set(["strong", "em", "s"]);

const WORDS = new Set(["text", "text_special", "softbreak"]);

const shown = new WeakMap(); // by the element of a block: the parts in it

/**
 * Show `text` in the element of a block. Parts that stand there already stay, and words that go on get the rest, so
 * that a long paragraph grows at its end. Very long text without a break is shown as it is.
 */
export function showInline(box, text, env) {
  const before = shown.get(box) ?? [];
  const after = text.length > LONGEST ? [{ isWords: true, text }] : partsOf(parseInline(text, env));
  let same = 0;
  while (before[same] && after[same] && isSame(before[same], after[same])) after[same].node = before[same++].node;
  const [old, grown] = [before[same], after[same]];
  if (old?.isWords && grown?.isWords && grown.text.startsWith(old.text)) {
    old.node.appendData(grown.text.slice(old.text.length));
    grown.node = old.node;
    same++;
  }
  for (const { node } of before.slice(same)) node.remove();
  for (const part of after.slice(same)) box.append((part.node = nodeOf(part)));
  shown.set(box, after);
}

/** Group tokens into words, `{isWords, text}`, and others, `{tokens, text}`. What has equal texts looks equal. */
function partsOf(tokens) {
  const parts = [];
  let depth = 0;
  // Around each emphasis stand words without letters.
  for (const token of tokens.filter(({ type, content }) => type !== "text" || content)) {
    const isWords = depth === 0 && WORDS.has(token.type),
      last = parts.at(-1);
    if (isWords && last?.isWords) last.text += wordsOf(token);
    else if (isWords) parts.push({ isWords, text: wordsOf(token) });
    else {
      if (depth === 0) parts.push({ tokens: [], text: "" });
      parts.at(-1).tokens.push(token);
      parts.at(-1).text += `${token.type}\n${token.content}\n${token.attrs ?? ""}\n`;
    }
    depth += token.nesting;
  }
  return parts;
}

function isSame(before, after) {
  return before.isWords === after.isWords && before.text === after.text;
}

function nodeOf(part) {
  if (part.isWords) return document.createTextNode(part.text);
  const path = [document.createDocumentFragment()];
  for (const token of part.tokens) {
    if (token.nesting < 0) {
      path.pop();
      continue;
    }
    const made = token.nesting > 0 ? opened(token) : leaf(token);
    path.at(-1).append(made);
    if (token.nesting > 0) path.push(made);
  }
  return path[0].firstChild;
}

const wordsOf = token => (token.type === "softbreak" ? "\n" : token.content);

function opened(token) {
  if (token.tag === "a") return link(token.attrGet("href"), token.attrGet("title"));
  return element(TAGS.has(token.tag) ? token.tag : "span");
}

/** Return a link that opens elsewhere and tells nothing of this page. The parser has refused all but web and mail. */
function link(href, title) {
  return element("a", { href, title, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function leaf(token) {
  switch (token.type) {
    case "code_inline":
      return element("code", { text: token.content });
    case "math":
      return mathElement(token.content, token.meta.isDisplay);
    case "hardbreak":
      return element("br");
    case "image":
      return image(token);
    default:
      return wordsOf(token);
  }
}

/** Return a link to a picture: this page loads nothing from elsewhere. */
function image(token) {
  const made = link(token.attrGet("src"), token.attrGet("title"));
  made.append(token.content || token.attrGet("src"));
  return made;
}
