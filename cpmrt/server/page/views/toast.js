// A short message at the edge of the page, with at most one thing to do about it.

import { element } from "../dom.js";

const SHOWN_MS = 8000;

export class Toast {
  constructor(box) {
    this.box = box;
  }

  show(text, action = null) {
    clearTimeout(this.timer);
    const button =
      action &&
      element("button", {
        type: "button",
        text: action.label,
        onclick: () => {
          this.hide();
          action.run();
        },
      });
    this.box.replaceChildren(element("span", { text }), ...(button ? [button] : []));
    this.box.hidden = false;
    this.timer = setTimeout(() => this.hide(), SHOWN_MS);
  }

  hide() {
    this.box.hidden = true;
  }
}
