// The box that a question is written in.

const HAS_KEYBOARD = matchMedia("(hover: hover)");

export class Composer {
  /** `actions` has `ask(text)`, `stop()` and `editLast()`. */
  constructor({ form, box, send, stop }, actions) {
    Object.assign(this, { box, send, stop, actions });
    form.addEventListener("submit", event => {
      event.preventDefault();
      this.#submit();
    });
    box.addEventListener("input", () => this.#grow());
    box.addEventListener("keydown", event => this.#onKey(event));
    stop.addEventListener("click", () => actions.stop());
    this.setWriting(false);
  }

  setWriting(isWriting) {
    this.isWriting = isWriting;
    const hadFocus = document.activeElement === this.send || document.activeElement === this.stop;
    this.stop.hidden = !isWriting;
    this.send.hidden = isWriting;
    if (hadFocus) (isWriting ? this.stop : this.box).focus();
    this.#grow();
  }

  /** Put the cursor here, but do not make a phone open its keyboard. */
  focus() {
    if (HAS_KEYBOARD.matches) this.box.focus();
  }

  #submit() {
    const text = this.box.value.trim();
    if (!text || this.isWriting) return;
    this.box.value = "";
    this.#grow();
    this.actions.ask(text);
  }

  #onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.#submit();
    } else if (event.key === "ArrowUp" && !this.box.value) {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  #grow() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight}px`;
    this.send.disabled = !this.box.value.trim();
  }
}
