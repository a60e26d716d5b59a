// A code block that grows: whole lines are coloured once and stay, only the last line is drawn again.

import { copyButton } from "../clipboard.js";
import { element } from "../dom.js";
import { highlightLine } from "./highlight.js";
import { languageOf } from "./languages.js";

const LINES_OF_A_PART = 40;

export class CodeBlock {
  constructor(info) {
    const name = info.trim().split(/\s/)[0];
    this.language = languageOf(info);
    this.code = element("code");
    const head = element(
      "div",
      { class: "code-head" },
      element("span", { text: name }),
      copyButton("Copy code", () => this.text),
    );
    // The keyboard scrolls what it can reach.
    const pre = element(
      "pre",
      { tabindex: "0", role: "group", "aria-label": name ? `${name} code` : "Code" },
      this.code,
    );
    this.dom = element("div", { class: "code-block" }, head, pre);
    this.#clear();
  }

  /** Show `text`, which mostly begins with what is shown already. */
  update(text) {
    if (!text.startsWith(this.done)) this.#clear();
    this.text = text;
    this.lastLine.replaceChildren();
    const end = text.lastIndexOf("\n") + 1;
    if (end > this.done.length) {
      for (const line of text.slice(this.done.length, end - 1).split("\n")) this.#addLine(line);
      this.done = text.slice(0, end);
    }
    this.#write(this.lastLine, text.slice(end));
    this.code.append(this.lastLine);
  }

  #clear() {
    this.text = this.done = "";
    this.open = null;
    this.count = 0;
    this.lastLine = element("span");
    this.code.replaceChildren();
  }

  /** Add a whole line. Lines stand in parts, so that a browser lays out only the last part again. */
  #addLine(line) {
    if (this.count++ % LINES_OF_A_PART === 0) {
      this.part = element("span", { class: "code-part" });
      this.code.append(this.part);
    }
    this.open = this.#write(this.part, line);
    this.part.append("\n");
  }

  #write(box, line) {
    if (!this.language) {
      box.append(line);
      return null;
    }
    const { parts, open } = highlightLine(line, this.language, this.open);
    box.append(...parts.map(([kind, text]) => (kind ? element("span", { class: `code-${kind}`, text }) : text)));
    return open;
  }
}
