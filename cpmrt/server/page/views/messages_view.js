// The messages of the conversation that is shown. What is written is drawn once a frame, for a part of the frame.

import { AnswerView } from "./answer_view.js";
import { QuestionView } from "./question_view.js";

const BUDGET_MS = 8;
const HIDDEN_MS = 200;
const NEAR_END = 80;

export class MessagesView {
  /** `box` scrolls, `list` holds the messages; `actions` are those of the messages. */
  constructor(box, list, endButton, actions) {
    Object.assign(this, { box, list, endButton });
    this.actions = { ...actions, redraw: view => this.redraw(view) };
    this.views = new Map();
    this.changed = new Set();
    this.follows = true;
    this.generation = null;
    this.restUntil = 0;
    box.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    endButton.addEventListener("click", () => this.scrollToEnd());
  }

  /** Show the branch of a conversation; `generation` writes its last answer, or is null. */
  show(conversation, generation) {
    this.generation = generation;
    const path = conversation.path(),
      known = new Map(this.views);
    this.views.clear();
    for (const message of path) {
      const siblings = conversation.siblings(message),
        old = known.get(message.id);
      const isSame = old?.message === message && old.siblings.length === siblings.length;
      this.views.set(message.id, isSame ? old : this.#viewOf(message, siblings));
    }
    const shown = [...this.views.values()].map(view => view.dom);
    shown.forEach((dom, index) => {
      if (this.list.children[index] !== dom) this.list.insertBefore(dom, this.list.children[index] ?? null);
    });
    while (this.list.children.length > shown.length) this.list.lastChild.remove();
  }

  #viewOf(message, siblings) {
    const view =
      message.role === "user"
        ? new QuestionView(message, siblings, this.actions)
        : new AnswerView(message, siblings, this.actions);
    if (message.role === "assistant") this.redraw(view);
    return view;
  }

  /** Draw more of the answer that is being written. */
  update() {
    const view = this.views.get(this.generation?.answer.id);
    if (view) this.redraw(view);
  }

  /** Show the end of the answer that was being written. */
  end() {
    const view = this.views.get(this.generation?.answer.id);
    this.generation = null;
    if (view) this.redraw(view);
  }

  redraw(view) {
    if (!this.changed.size) this.#plan();
    this.changed.add(view);
  }

  /** Draw in the next frame, or later if the last drawing took long; a hidden page has no frames. */
  #plan() {
    const frame = () => requestAnimationFrame(() => this.#draw());
    const pauseMs = this.restUntil - performance.now();
    if (document.hidden) setTimeout(() => this.#draw(), HIDDEN_MS);
    else if (pauseMs > 0) setTimeout(frame, pauseMs);
    else frame();
  }

  /** Draw slices until the time of a frame is used up. The time that the browser lays them out counts too. */
  #draw() {
    const begun = performance.now();
    let now = begun;
    while (this.changed.size && now - begun < BUDGET_MS) {
      this.#drawSlice();
      const height = this.box.scrollHeight;
      if (this.follows) this.box.scrollTop = height;
      now = performance.now();
    }
    this.restUntil = now - begun > 2 * BUDGET_MS ? 2 * now - begun : 0;
    if (this.changed.size) this.#plan();
  }

  #drawSlice() {
    // What is read first is at the end: an opened conversation is drawn from there.
    const view = [...this.changed].at(-1),
      isShown = this.views.get(view.message.id) === view;
    const generation = view.message === this.generation?.answer ? this.generation : null;
    if (!isShown || !view.draw(generation)) this.changed.delete(view);
  }

  scrollToEnd() {
    this.follows = true;
    this.endButton.hidden = true;
    this.box.scrollTop = this.box.scrollHeight;
  }

  #onScroll() {
    this.follows = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < NEAR_END;
    this.endButton.hidden = this.follows;
  }
}
