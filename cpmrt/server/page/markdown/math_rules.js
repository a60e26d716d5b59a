// Rules that find maths in $...$, $$...$$, \(...\) and \[...\] before Markdown reads its underscores and backslashes.

const CLOSING = { $$: "$$", "\\[": "\\]", "\\(": "\\)" };

export function addMath(parser) {
  parser.inline.ruler.before("escape", "math", inlineMath);
  const alt = ["paragraph", "reference", "blockquote", "list"];
  parser.block.ruler.after("fence", "math_block", mathBlock, { alt });
}

function inlineMath(state, silent) {
  const { src, pos } = state;
  const opening = src.slice(pos, pos + 2);
  const found = CLOSING[opening] ? delimited(state, opening) : src[pos] === "$" ? betweenDollars(state) : null;
  if (!found) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = found.text;
    token.meta = { isDisplay: opening === "$$" || opening === "\\[" };
  }
  state.pos = found.end;
  return true;
}

function delimited(state, opening) {
  const begin = state.pos + 2,
    end = closing(state, CLOSING[opening], begin);
  const text = state.src.slice(begin, end);
  return end < 0 || !text.trim() ? null : { text, end: end + 2 };
}

/** Find the next closing mark. A mark known to be missing is not looked for again, as each `$` of a text asks. */
function closing(state, mark, begin) {
  const missing = (state.missingMarks ??= new Set());
  const end = missing.has(mark) ? -1 : state.src.indexOf(mark, begin);
  if (end < 0) missing.add(mark);
  return end;
}

/** Read $x$, but not "$5 and $6": no space inside of the marks, no digit after the last. */
function betweenDollars(state) {
  const { src, pos } = state;
  if (/[\s$]/.test(src[pos + 1] ?? " ") || src[pos - 1] === "$") return null;
  const end = closing(state, "$", pos + 1);
  if (end < 0 || /[\s\\]/.test(src[end - 1]) || /\d/.test(src[end + 1] ?? "")) return null;
  return { text: src.slice(pos + 1, end), end: end + 1 };
}

/**
 * Read maths that has its lines for itself. It ends with its closing mark at the end of a line; a blank line or more
 * text before that mean that it was none. At the end of the text it is still open, as more may come.
 */
function mathBlock(state, startLine, endLine, silent) {
  const first = lineOf(state, startLine),
    mark = CLOSING[first.slice(0, 2)];
  if (!mark || first.startsWith("\\(") || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const lines = [];
  let line = startLine,
    isClosed = false;
  for (; line < endLine && !isClosed; line++) {
    const text = line === startLine ? first.slice(2) : lineOf(state, line);
    if ((line > startLine && !text.trim()) || state.sCount[line] < state.blkIndent) return false;
    const end = text.indexOf(mark);
    if (end >= 0 && text.slice(end + 2).trim()) return false;
    isClosed = end >= 0;
    lines.push(isClosed ? text.slice(0, end) : text);
  }
  if (silent) return true;
  const token = state.push("math_block", "", 0);
  token.content = lines.join("\n").trim();
  token.map = [startLine, line];
  token.meta = { isClosed };
  state.line = line;
  return true;
}

function lineOf(state, line) {
  return state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
}
