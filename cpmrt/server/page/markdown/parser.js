// Markdown as a tree of blocks. Their text is parsed when it is shown, so that reading a long answer again is cheap.

import MarkdownIt from "../vendor/markdown-it/markdown-it.mjs";
import { addMath } from "./math_rules.js";

const DEEPEST_BLOCK = 30;
const DEEPEST_INLINE = 60;
const LINKS = /^(https?:\/\/|mailto:)/i;

const blocks = new MarkdownIt({ html: false });
const inline = new MarkdownIt({ html: false, linkify: true });
blocks.core.ruler.enableOnly(["normalize", "block"]);
inline.options.maxNesting = DEEPEST_INLINE;
inline.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
for (const parser of [blocks, inline]) {
  parser.validateLink = address => LINKS.test(address.trim());
  addMath(parser);
}
blocks.block.ruler.before("table", "too_deep", tooDeep, { alt: [] });

/** Show blocks that are nested deeper than anybody nests them as one block of text. */
function tooDeep(state, line, end, silent) {
  if (state.level < DEEPEST_BLOCK) return false;
  if (silent) return true;
  const token = state.push("code_block", "code", 0);
  token.content = state.getLines(line, end, state.blkIndent, true);
  token.map = [line, end];
  state.line = end;
  return true;
}

/**
 * Return the blocks of a text: `{kind, tag, key, line, end, text, info, children}`. `line` is where a block of the top
 * level begins, `end` the line behind it, `text` is unparsed for blocks that hold words. Equal keys mean that one
 * element can show either block. `env` keeps the link definitions of a document from call to call.
 */
export function parseBlocks(text, env) {
  const root = { children: [] },
    path = [root];
  for (const token of blocks.parse(text, env)) {
    if (token.type === "inline") path.at(-1).text = token.content;
    else if (token.nesting < 0) path.pop();
    else {
      const block = asBlock(token);
      path.at(-1).children.push(block);
      if (token.nesting > 0) path.push(block);
    }
  }
  return root.children;
}

function asBlock(token) {
  const kind = token.type.replace(/_open$/, ""),
    attributes = token.attrs?.join(" ") ?? "";
  return {
    kind,
    tag: token.tag,
    key: `${kind} ${token.tag} ${token.hidden} ${attributes} ${token.info}`,
    isTight: token.hidden,
    align: /text-align:(\w+)/.exec(attributes)?.[1],
    start: token.attrGet("start"),
    line: token.map?.[0] ?? 0,
    end: token.map?.[1],
    text: token.content,
    info: token.info,
    isClosed: token.meta?.isClosed,
    children: [],
  };
}

/** Return markdown-it's tokens of the text of one block. */
export function parseInline(text, env) {
  const tokens = [];
  inline.inline.parse(text, inline, env, tokens);
  return tokens;
}
