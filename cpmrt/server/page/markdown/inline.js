// The words of a block: emphasis, code, links and maths, as elements.

import { element } from "../dom.js";
import { mathElement } from "./math.js";
import { parseInline } from "./parser.js";

const LONGEST = 12000;
const TAGS = new Set(["strong", "em", "s"]);

/** Show `text` in `box`, where `before` stood. Very long text without a break is shown as it is. */
export function showInline(box, text, before, env) {
  if (text.length <= LONGEST) {
    box.replaceChildren(...inlineNodes(text, env));
  } else if (before.length > LONGEST && text.startsWith(before)) {
    box.firstChild.appendData(text.slice(before.length));
  } else {
    box.textContent = text;
  }
}

function inlineNodes(text, env) {
  const top = { nodes: [] },
    path = [top];
  const add = node => (path.at(-1).element ? path.at(-1).element.append(node) : top.nodes.push(node));
  for (const token of parseInline(text, env)) {
    if (token.nesting < 0) {
      if (path.length > 1) path.pop();
    } else if (token.nesting > 0) {
      const made = opened(token);
      add(made);
      path.push({ element: made });
    } else {
      add(leaf(token));
    }
  }
  return top.nodes;
}

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
    case "softbreak":
      return "\n";
    case "image":
      return image(token);
    default:
      return token.content;
  }
}

/** Return a link to a picture: this page loads nothing from elsewhere. */
function image(token) {
  const made = link(token.attrGet("src"), token.attrGet("title"));
  made.append(token.content || token.attrGet("src"));
  return made;
}
