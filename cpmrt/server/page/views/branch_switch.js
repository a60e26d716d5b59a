// "‹ 2 / 3 ›" under a message that was written more than once.

import { element, iconButton } from "../dom.js";

/** Return the switch between `siblings`, or null where there is only one; `select(message)` shows another. */
export function branchSwitch(message, siblings, select) {
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  const step = (name, label, other) => iconButton(name, label, () => select(other), { disabled: !other });
  return element(
    "span",
    { class: "branches", role: "group", "aria-label": "Versions" },
    step("left", "Version before", siblings[at - 1]),
    element("span", { text: `${at + 1} / ${siblings.length}` }),
    step("right", "Next version", siblings[at + 1]),
  );
}
