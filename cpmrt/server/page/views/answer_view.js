// An answer of the model: its thoughts, folded, its text as it grows, and below it what it cost and what can be done.

import { copyButton } from "../clipboard.js";
import { element, iconButton } from "../dom.js";
import { MarkdownStream } from "../markdown/stream.js";
import { branchSwitch } from "./branch_switch.js";

export class AnswerView {
  /** `actions` has `regenerate(message)`, `select(message)` and `redraw(view)`. */
  constructor(message, siblings, actions) {
    Object.assign(this, { message, siblings, actions });
    this.body = element("div", { class: "prose" });
    this.foot = element("div", { class: "foot" });
    this.notes = element("div", { class: "notes" });
    this.waiting = element("div", { class: "waiting" }, element("span"), element("span"), element("span"));
    this.dom = element(
      "article",
      { class: "message assistant", "data-id": message.id },
      element("h2", { class: "off-screen", text: "Answer" }),
      this.notes,
      this.body,
      this.foot,
    );
    this.text = { stream: new MarkdownStream(this.body), length: 0 };
    this.thoughts = null;
  }

  /** Show a slice more; returns whether more waits. `generation` is what writes the answer, or null at its end. */
  draw(generation) {
    const { message } = this;
    this.dom.classList.toggle("writing", Boolean(generation));
    if (message.thoughts) this.#drawThoughts(generation);
    const isMore = feed(this.text, message.content) || (this.thoughts?.details.open && this.thoughts.isMore);
    if (generation && !message.content && !message.thoughts) this.dom.insertBefore(this.waiting, this.body);
    else this.waiting.remove();
    if (generation) this.#drawSpeed();
    else if (!isMore) this.#drawEnd();
    return isMore;
  }

  #drawThoughts(generation) {
    if (!this.thoughts) {
      const body = element("div", { class: "prose" }),
        summary = element("summary");
      const details = element("details", { class: "thoughts" }, summary, body);
      details.addEventListener("toggle", () => this.actions.redraw(this));
      this.thoughts = { details, summary, stream: new MarkdownStream(body), length: 0, isMore: true };
      this.dom.insertBefore(details, this.body);
    }
    const { thoughts } = this,
      isThinking = Boolean(generation?.isThinking);
    const label = isThinking ? "Thinking…" : "Thoughts";
    if (thoughts.summary.textContent !== label) thoughts.summary.textContent = label;
    thoughts.details.classList.toggle("thinking", isThinking);
    // Folded thoughts cost nothing.
    if (thoughts.details.open) thoughts.isMore = feed(thoughts, this.message.thoughts);
  }

  #drawSpeed() {
    const { speed } = this.message;
    if (!speed) return;
    this.stats ??= element("span", { class: "stats" });
    if (!this.stats.parentNode) this.foot.replaceChildren(this.stats);
    this.stats.textContent = speedText(speed);
  }

  #drawEnd() {
    const { message, siblings, actions } = this;
    this.notes.replaceChildren(...(message.leftOut ? [note(leftOutText(message.leftOut))] : []));
    const end = endText(message);
    this.foot.replaceChildren(
      ...(end ? [note(end, message.problem ? "wrong" : "")] : []),
      ...[branchSwitch(message, siblings, actions.select)].filter(Boolean),
      copyButton("Copy answer", () => message.content),
      iconButton("again", "Answer again", () => actions.regenerate(message), { class: "icon-button regenerate" }),
      element("span", { class: "stats", text: message.speed ? speedText(message.speed) : "" }),
    );
  }
}

/** Give a stream what has been added to a text. */
function feed(shown, text) {
  if (text.length > shown.length) shown.stream.push(text.slice(shown.length));
  shown.length = text.length;
  return shown.stream.draw();
}

function note(text, kind = "") {
  return element("p", { class: `note ${kind}`, text });
}

function leftOutText(count) {
  const what = count === 1 ? "The oldest question and its answer" : `The ${count} oldest questions and their answers`;
  return `${what} no longer fit into the model's context and were left out.`;
}

function endText({ problem, finish, speed, lengthLimit }) {
  if (problem) return problem;
  if (!finish) return "The page was closed before this answer ended.";
  if (finish === "stopped") return "You stopped this answer.";
  if (finish === "loop") return "The answer had begun to repeat itself, so it was ended.";
  if (finish !== "length") return null;
  return lengthLimit && speed?.tokens >= lengthLimit
    ? `The answer ends here because “Max tokens” is set to ${lengthLimit}.`
    : "The answer ends here because the model's context is full.";
}

function speedText({ tokens, firstMs, restMs, prompt, cached }) {
  const parts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  if (restMs > 0 && tokens > 1) parts.push(`${((tokens - 1) / (restMs / 1000)).toFixed(1)} tokens/s`);
  if (firstMs !== undefined) parts.push(`first after ${(firstMs / 1000).toFixed(2)} s`);
  if (prompt) parts.push(`prompt ${prompt}`, `cached ${cached}`);
  return parts.join(" · ");
}
