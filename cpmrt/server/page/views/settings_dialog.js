// The dialog of the settings: empty numbers mean the model's own, which stand in their boxes as hints.

import { element } from "../dom.js";
import { NUMBERS } from "../settings.js";

export class SettingsDialog {
  /** `onChange()` is called when the dialog closes; `onKey()` when there is another key. */
  constructor({ dialog, form, numbers, source, system, thinking, key, reset }, settings, { onChange, onKey }) {
    Object.assign(this, { dialog, source, system, thinking, key, settings });
    this.boxes = Object.entries(NUMBERS).map(([name, rule]) => {
      const box = element("input", {
        id: `setting-${name}`,
        type: "number",
        min: rule.min,
        max: rule.max,
        step: rule.isWhole ? 1 : "any",
        placeholder: rule.hint,
      });
      numbers.append(element("label", {}, element("span", { text: rule.label }), box));
      return [name, box];
    });
    form.addEventListener("submit", event => {
      event.preventDefault();
      dialog.close();
    });
    reset.addEventListener("click", () => {
      for (const [, box] of this.boxes) box.value = "";
      thinking.value = "";
    });
    dialog.addEventListener("click", event => {
      if (event.target === dialog) dialog.close();
    });
    dialog.addEventListener("close", () => {
      const isOtherKey = this.#read();
      onChange(this.system.value);
      if (isOtherKey) onKey();
    });
  }

  /** Show what the model samples with where nothing is set, and where that comes from. */
  setDefaults(defaults) {
    for (const [name, box] of this.boxes) box.placeholder = defaults[name] ?? NUMBERS[name].hint ?? "";
    this.source.textContent = `Empty boxes mean the model's own values, in grey (${defaults.source}).`;
  }

  open(system, focusKey = false) {
    const { settings } = this;
    for (const [name, box] of this.boxes) box.value = settings.numbers[name] ?? "";
    this.system.value = this.shownSystem = system;
    this.thinking.value = settings.thinking;
    this.key.value = settings.key;
    if (!this.dialog.open) this.dialog.showModal();
    if (focusKey) this.key.focus();
  }

  #read() {
    const { settings } = this,
      isOtherKey = settings.key !== this.key.value.trim();
    for (const [name, box] of this.boxes) {
      settings.numbers[name] = box.value === "" || !box.checkValidity() ? null : box.valueAsNumber;
    }
    settings.thinking = this.thinking.value;
    if (this.system.value !== this.shownSystem) settings.system = this.system.value;
    settings.key = this.key.value.trim();
    settings.save();
    return isOtherKey;
  }
}
