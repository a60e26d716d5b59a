// The chat: conversations, the one that is shown, and the answers that are being written in any of them.

import { Conversation } from "./conversation.js";
import { Generation } from "./generation.js";
import { readFile, saveFile } from "./transfer.js";

const SAVE_EVERY_MS = 2000;

export class Chat {
  /** `view` shows what changes, by the methods of the object in app.js. `channel` tells other tabs. */
  constructor({ store, settings, view, channel }) {
    Object.assign(this, { store, settings, view, channel });
    this.model = null;
    this.generations = new Map(); // by the id of the conversation
    this.heads = [];
    this.conversation = this.#empty();
    channel.onmessage = ({ data }) => this.#onOtherTab(data);
  }

  async begin(id) {
    await this.#list();
    if (id) await this.open(id);
    else this.#show();
  }

  get generation() {
    return this.generations.get(this.conversation.id) ?? null;
  }

  fresh() {
    this.conversation = this.#empty();
    this.#show();
  }

  async open(id) {
    const writing = this.generations.get(id)?.conversation;
    const record = writing ? null : await this.store.get(id);
    if (!writing && !record) return this.fresh();
    this.conversation = writing ?? new Conversation(record);
    this.#show();
  }

  ask(text) {
    const { conversation } = this,
      last = conversation.path().at(-1) ?? null;
    this.#answer(conversation.add(last, "user", text));
  }

  edit(message, text) {
    if (!this.generation) this.#answer(this.conversation.add(this.conversation.message(message.parent), "user", text));
  }

  regenerate(answer) {
    if (!this.generation) this.#answer(this.conversation.message(answer.parent));
  }

  select(message) {
    if (this.generation) return;
    this.conversation.select(message);
    this.#save(this.conversation);
    this.view.showConversation(this.conversation, null);
  }

  stop() {
    this.generation?.stop();
  }

  setSystem(system) {
    this.conversation.system = system;
    if (this.conversation.messages.length) this.#save(this.conversation);
  }

  async rename(id, title) {
    await this.#change(id, conversation => {
      conversation.title = title;
    });
  }

  async remove(id) {
    const generation = this.generations.get(id);
    generation?.stop();
    await generation?.ended;
    const record = await this.store.get(id);
    await this.store.remove(id);
    if (this.conversation.id === id) this.fresh();
    await this.#changed();
    return async () => {
      await this.store.put(record);
      await this.#changed();
    };
  }

  async save(id) {
    const record = await this.store.get(id);
    saveFile([record], record.title);
  }

  async saveAll() {
    const records = await Promise.all(this.heads.map(head => this.store.get(head.id)));
    saveFile(records, "conversations");
  }

  /** Read a file of conversations; returns how many there were. Throws an Error that says what is wrong with it. */
  async load(file) {
    const records = readFile(await file.text());
    for (const record of records) await this.store.put(record);
    await this.#changed();
    if (records.length === 1) await this.open(records[0].id);
    return records.length;
  }

  /** Keep what has been written of the answers, as when the page goes away. */
  saveWriting() {
    for (const { conversation } of this.generations.values()) this.#keep(conversation);
  }

  async #answer(question) {
    const { conversation, settings } = this,
      answer = conversation.add(question, "assistant", "");
    const fields = settings.fields();
    if (fields.max_tokens) answer.lengthLimit = fields.max_tokens;
    const request = { fields, key: settings.key, contextLength: this.model?.max_model_len };
    const generation = new Generation(conversation, answer, request, () => this.#onPiece(generation));
    this.generations.set(conversation.id, generation);
    this.#show();
    this.#save(conversation);
    const timer = setInterval(() => this.#keep(conversation), SAVE_EVERY_MS);
    generation.ended = generation.run();
    await generation.ended;
    clearInterval(timer);
    this.generations.delete(conversation.id);
    await this.#save(conversation);
    this.view.showList(this.heads, this.conversation.id, this.generations);
    if (this.conversation === conversation) this.view.endAnswer(generation);
  }

  #onPiece(generation) {
    if (generation.conversation === this.conversation) this.view.updateAnswer();
  }

  #empty() {
    return new Conversation({ system: this.settings.system });
  }

  #show() {
    this.view.showConversation(this.conversation, this.generation);
    this.view.showList(this.heads, this.conversation.id, this.generations);
  }

  async #change(id, change) {
    const open = this.generations.get(id)?.conversation ?? (this.conversation.id === id ? this.conversation : null);
    const conversation = open ?? new Conversation(await this.store.get(id));
    change(conversation);
    await this.#save(conversation);
    this.#show();
  }

  async #save(conversation) {
    if (await this.#keep(conversation)) await this.#changed(conversation.id);
  }

  /** Store a conversation; returns false, and says so, if the browser takes no more. */
  async #keep(conversation) {
    try {
      await this.store.put(conversation.record());
      return true;
    } catch (error) {
      this.view.showProblem(`The browser does not keep this conversation: ${error.message}`);
      return false;
    }
  }

  async #changed(id = null) {
    this.channel.postMessage(id);
    await this.#list();
  }

  async #list() {
    this.heads = await this.store.heads();
    this.view.showList(this.heads, this.conversation.id, this.generations);
  }

  async #onOtherTab(id) {
    await this.#list();
    if (id === this.conversation.id && !this.generation) await this.open(id);
  }
}
