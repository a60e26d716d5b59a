// A person's settings: sampling in the browser's localStorage, the key in its sessionStorage.

const PLACE = "cpmrt.settings";
const KEY_PLACE = "cpmrt.key";

/** The numbers of a request. `hint` is the value if neither the person nor the checkpoint says one. */
export const NUMBERS = {
  temperature: { label: "Temperature", min: 0, max: 5 },
  top_p: { label: "Top p", min: 0.01, max: 1 },
  top_k: { label: "Top k", min: 0, isWhole: true },
  min_p: { label: "Min p", min: 0, max: 1 },
  repetition_penalty: { label: "Repetition penalty", min: 0.5, max: 2 },
  presence_penalty: { label: "Presence penalty", hint: 0, min: -2, max: 2 },
  frequency_penalty: { label: "Frequency penalty", hint: 0, min: -2, max: 2 },
  max_tokens: { label: "Max tokens", hint: "as fits", min: 1, isWhole: true },
  seed: { label: "Seed", hint: "random", isWhole: true },
  loop_repeats: { label: "End at repeats", hint: 8, min: 0, isWhole: true },
};

export class Settings {
  constructor() {
    const { numbers = {}, thinking = "", system = "" } = read(localStorage, PLACE);
    this.numbers = numbers;
    this.thinking = thinking;
    this.system = system;
  }

  /** The API key lives as long as the tab: it survives a reload, and nobody finds it on the disk afterwards. */
  get key() {
    return read(sessionStorage, KEY_PLACE).key ?? "";
  }

  set key(key) {
    write(sessionStorage, KEY_PLACE, { key });
  }

  save() {
    const { numbers, thinking, system } = this;
    write(localStorage, PLACE, { numbers, thinking, system });
  }

  /** Return the fields of a request. What nobody has set is left to the server, which takes the checkpoint's own; it
   * leaves answers that repeat themselves alone unless it is told how often they may. */
  fields() {
    const fields = { loop_repeats: NUMBERS.loop_repeats.hint };
    for (const name of Object.keys(NUMBERS)) if (Number.isFinite(this.numbers[name])) fields[name] = this.numbers[name];
    if (this.thinking) fields.chat_template_kwargs = { enable_thinking: this.thinking === "on" };
    return fields;
  }
}

function read(storage, place) {
  try {
    return JSON.parse(storage.getItem(place)) ?? {};
  } catch {
    return {};
  }
}

function write(storage, place, value) {
  try {
    storage.setItem(place, JSON.stringify(value));
  } catch {
    /* a browser without storage: what is set lasts as long as the page */
  }
}
