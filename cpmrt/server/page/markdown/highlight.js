// Colours code line by line, so that code that is still being written only ever gets more of it.

import { isConstant } from "./languages.js";

const LONGEST_LINE = 1000;
const escaped = text => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const scanners = new Map();

/** Return a pattern with one group for each kind of text that the language has. */
function scannerOf(language) {
  if (scanners.has(language)) return scanners.get(language);
  const openings = pairs => (pairs ?? []).map(([opening]) => escaped(opening)).join("|") || "(?!)";
  const quoted = [...(language.quotes ?? `"'`)].map(q => `${q}(?:\\\\.|[^${q}\\\\])*${q}?`).join("|");
  const scanner = new RegExp(
    [
      `(?<comment>(?:${(language.line ?? []).map(escaped).join("|") || "(?!)"}).*)`,
      `(?<block>${openings(language.block)})`,
      `(?<long>${openings(language.long)})`,
      `(?<directive>${language.directive?.source ?? "(?!)"})`,
      `(?<string>${quoted})`,
      "(?<number>\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\w*)",
      "(?<word>[\\p{L}_$][\\p{L}\\d_$]*)",
    ].join("|"),
    "gu",
  );
  scanners.set(language, scanner);
  return scanner;
}

function kindOfWord(word, line, end, language) {
  if (language.keywords.has(language.ignoresCase ? word.toLowerCase() : word)) return "keyword";
  if (isConstant(word)) return "number";
  if (line[end] === "(") return "function";
  return /^\p{Lu}\p{L}*\p{Ll}/u.test(word) ? "type" : null;
}

/**
 * Split a line of code into parts `[kind or null, text]`. `open` is null, or what an earlier line began and this one
 * goes on with: `{kind, closing}`. Returns the parts and what is open behind the line.
 */
export function highlightLine(line, language, open) {
  if (line.length > LONGEST_LINE) return { parts: [[null, line]], open };
  const parts = [],
    scanner = scannerOf(language);
  let at = 0;
  const add = (kind, end) => {
    if (end > at) parts.push([kind, line.slice(at, end)]);
    at = Math.max(at, end);
  };
  for (;;) {
    if (open) {
      const end = line.indexOf(open.closing, at);
      add(open.kind, end < 0 ? line.length : end + open.closing.length);
      if (end < 0) return { parts, open };
      open = null;
    }
    scanner.lastIndex = at;
    const found = scanner.exec(line);
    if (!found) break;
    add(null, found.index);
    const { groups } = found,
      end = scanner.lastIndex;
    if (groups.block || groups.long) {
      const pairs = groups.block ? language.block : language.long;
      open = { kind: groups.block ? "comment" : "string", closing: pairs.find(([opening]) => opening === found[0])[1] };
      parts.push([open.kind, found[0]]);
      at = end;
    } else if (groups.word) add(kindOfWord(groups.word, line, end, language), end);
    else
      add(
        Object.keys(groups).find(kind => groups[kind] !== undefined),
        end,
      );
  }
  add(null, line.length);
  return { parts, open };
}
