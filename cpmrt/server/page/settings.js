// What a person has set: sampling in the browser's localStorage, the key in its sessionStorage.

const PLACE = "cpmrt.settings";
const KEY_PLACE = "cpmrt.key";

/** The numbers of a request, with what the server takes where nothing is set and it does not tell its own defaults. */
export const NUMBERS = {
  temperature: { label: "Temperature", default: 1, min: 0, max: 5, step: 0.05 },
  top_p: { label: "Top p", default: 1, min: 0.01, max: 1, step: 0.01 },
  top_k: { label: "Top k", default: 0, min: 0, step: 1 },
  min_p: { label: "Min p", default: 0, min: 0, max: 1, step: 0.01 },
  repetition_penalty: { label: "Repetition penalty", default: 1, min: 0.5, max: 2, step: 0.01 },
  presence_penalty: { label: "Presence penalty", default: 0, min: -2, max: 2, step: 0.1 },
  frequency_penalty: { label: "Frequency penalty", default: 0, min: -2, max: 2, step: 0.1 },
  max_tokens: { label: "Longest answer", default: "as far as the context goes", min: 1, step: 1 },
  seed: { label: "Seed", default: "random", step: 1 },
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

  /** Return the fields of a request. What nobody has set is left to the server, which takes the checkpoint's own. */
  fields() {
    const fields = {};
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
