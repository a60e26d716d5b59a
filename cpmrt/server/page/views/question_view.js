// A question of the person, with a way to write it again.

import { copyButton } from "../clipboard.js";
import { element, iconButton } from "../dom.js";
import { branchSwitch } from "./branch_switch.js";

export class QuestionView {
  /** `actions` has `edit(message, text)` and `select(message)`. */
  constructor(message, siblings, actions) {
    Object.assign(this, { message, siblings, actions });
    this.dom = element("article", { class: "message user", "data-id": message.id });
    this.#show();
  }

  #show() {
    const { message, siblings, actions } = this;
    this.editButton = iconButton("edit", "Edit question", () => this.#edit(), { class: "icon-button edit" });
    this.dom.replaceChildren(
      element("h2", { class: "off-screen", text: "You asked" }),
      element("div", { class: "bubble", text: message.content }),
      element(
        "div",
        { class: "foot" },
        branchSwitch(message, siblings, actions.select),
        copyButton("Copy question", () => message.content),
        this.editButton,
      ),
    );
  }

  #edit() {
    const box = element("textarea", {
      "aria-label": "Edit the question",
      rows: Math.min(12, this.message.content.split("\n").length + 1),
    });
    box.value = this.message.content;
    const close = () => {
      this.#show();
      this.editButton.focus();
    };
    const send = () => (box.value.trim() ? this.actions.edit(this.message, box.value.trim()) : close());
    box.addEventListener("keydown", event => {
      if (event.key === "Escape") close();
      else if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      else send();
      event.preventDefault();
      event.stopPropagation();
    });
    this.dom.replaceChildren(
      element("h2", { class: "off-screen", text: "You asked" }),
      element(
        "div",
        { class: "editor" },
        box,
        element(
          "div",
          { class: "editor-actions" },
          element("button", { type: "button", class: "quiet", text: "Cancel", onclick: close }),
          element("button", { type: "button", class: "primary", text: "Ask again", onclick: send }),
        ),
      ),
    );
    box.focus();
  }
}
