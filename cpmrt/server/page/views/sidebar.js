// The list of conversations, the newest first.

import { element, iconButton } from "../dom.js";

const DAY_MS = 86_400_000;

export class Sidebar {
  /** `actions` has `open(id)`, `rename(id, title)`, `remove(id)` and `save(id)`. */
  constructor(list, actions) {
    Object.assign(this, { list, actions });
    this.isRenaming = false;
  }

  /** Show the conversations `heads` under the day of their last change; `current` is the id of the one that is open. */
  show(heads, current, writing) {
    if (this.isRenaming) return; // the end of it shows the list again
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    const groups = new Map();
    for (const head of [...heads].sort((a, b) => b.updated - a.updated)) {
      const age = ageOf(head.updated);
      groups.set(age, [...(groups.get(age) ?? []), this.#item(head, head.id === current, writing.has(head.id))]);
    }
    this.list.replaceChildren(
      ...[...groups].map(([age, items]) =>
        element("section", {}, element("h2", { text: age }), element("ul", {}, ...items)),
      ),
    );
    if (focused) this.#itemOf(focused)?.querySelector("button")?.focus();
  }

  #itemOf(id) {
    return this.list.querySelector(`li[data-id="${CSS.escape(id)}"]`);
  }

  #item(head, isCurrent, isWriting) {
    const { actions } = this,
      title = head.title || "Untitled";
    const open = element("button", {
      type: "button",
      class: "open",
      "aria-current": isCurrent ? "page" : null,
      title,
      text: title,
      onclick: () => actions.open(head.id),
    });
    return element(
      "li",
      { "data-id": head.id, class: `${isCurrent ? "current" : ""} ${isWriting ? "writing" : ""}` },
      open,
      element(
        "span",
        { class: "item-actions" },
        iconButton("edit", `Rename “${title}”`, () => this.#rename(head)),
        iconButton("save", `Export “${title}”`, () => actions.save(head.id)),
        iconButton("delete", `Delete “${title}”`, () => actions.remove(head.id)),
      ),
    );
  }

  #rename(head) {
    const item = this.#itemOf(head.id),
      box = element("input", { type: "text", "aria-label": "New title", maxlength: "200" });
    box.value = head.title;
    this.isRenaming = true;
    const close = title => {
      if (!this.isRenaming) return;
      this.isRenaming = false;
      this.actions.rename(head.id, title.trim() || head.title);
    };
    box.addEventListener("keydown", event => {
      if (event.key === "Enter") close(box.value);
      if (event.key === "Escape") close(head.title);
      event.stopPropagation();
    });
    box.addEventListener("blur", () => close(box.value));
    item.replaceChildren(box);
    box.select();
  }
}

function ageOf(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / DAY_MS);
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 8 ? "Last seven days" : "Older";
}
