// The list of conversations opens and closes: beside the messages, or over them where the window is narrow.

const NARROW = matchMedia("(max-width: 800px)");

export class SidebarDrawer {
  constructor(sidebar, shade, openButton, closeButton) {
    Object.assign(this, { sidebar, shade, openButton });
    openButton.addEventListener("click", () => this.#set(!this.isOpen));
    for (const part of [shade, closeButton]) part.addEventListener("click", () => this.#set(false));
    document.addEventListener("keydown", event => {
      if (event.key === "Escape") this.closeOnPhone();
    });
    NARROW.addEventListener("change", () => this.#set(!NARROW.matches));
    this.#set(!NARROW.matches);
  }

  closeOnPhone() {
    if (NARROW.matches && this.isOpen) this.#set(false);
  }

  #set(isOpen) {
    const hadFocus = this.sidebar.contains(document.activeElement);
    this.isOpen = isOpen;
    document.body.classList.toggle("sidebar-closed", !isOpen);
    this.sidebar.inert = !isOpen;
    this.shade.hidden = !(isOpen && NARROW.matches);
    this.openButton.setAttribute("aria-expanded", String(isOpen));
    if (hadFocus && !isOpen) this.openButton.focus();
    if (isOpen && NARROW.matches) this.sidebar.querySelector("button").focus();
  }
}
