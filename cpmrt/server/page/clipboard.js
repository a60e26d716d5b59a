// Copies text, also on addresses without https, where browsers have no navigator.clipboard.

import { element, icon } from "./dom.js";

const SHOWN_MS = 1500;

/** Copy a text; returns whether that worked. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const box = element("textarea", { class: "off-screen", readonly: true, "aria-hidden": "true" });
  box.value = text;
  // In a modal dialog nothing outside can have the focus.
  (document.querySelector("dialog[open]") ?? document.body).append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return isCopied;
}

/** Return a button that copies what `text()` returns when it is pressed. */
export function copyButton(label, text) {
  const button = element(
    "button",
    { type: "button", class: "icon-button copy", "aria-label": label, title: label },
    icon("copy"),
  );
  button.addEventListener("click", async () => {
    const isCopied = await copyText(text());
    button.replaceChildren(icon(isCopied ? "check" : "cross"));
    button.classList.toggle("done", isCopied);
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.classList.remove("done");
    }, SHOWN_MS);
  });
  return button;
}
