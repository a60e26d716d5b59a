// A conversation as a tree: an edited question or another answer is a branch beside the first one, and nothing is lost.

/** Return an id that is new. crypto.randomUUID is missing on addresses without https. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map(byte => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  /**
   * `messages` are `{id, parent, role, content}`, parents first; answers may have `thoughts`, `finish`, `problem`,
   * `leftOut` and `speed`. `leaf` is the id of the last message of the branch that is shown.
   */
  constructor({
    id = newId(),
    title = "",
    created = Date.now(),
    updated = created,
    system = "",
    leaf = null,
    messages = [],
  } = {}) {
    Object.assign(this, { id, title, created, updated, system, leaf, messages: [...messages] });
  }

  message(id) {
    return this.messages.find(message => message.id === id);
  }

  /** Return the messages of the branch that is shown, the first question first. */
  path() {
    return this.pathTo(this.message(this.leaf));
  }

  pathTo(message) {
    const path = [],
      byId = new Map(this.messages.map(each => [each.id, each]));
    for (; message; message = byId.get(message.parent)) path.unshift(message);
    return path;
  }

  /** Return the messages that stand in the same place, in the order in which they were written. */
  siblings(message) {
    return this.messages.filter(other => other.parent === message.parent);
  }

  /** Add a message behind `parent` (null: at the beginning) and show its branch. */
  add(parent, role, content) {
    const message = { id: newId(), parent: parent?.id ?? null, role, content };
    this.messages.push(message);
    this.leaf = message.id;
    this.updated = Date.now();
    this.title ||= titleOf(content);
    return message;
  }

  /** Show the branch of a message, down to what was written last in it. */
  select(message) {
    for (let next = message; next; next = this.messages.findLast(each => each.parent === message.id)) message = next;
    this.leaf = message.id;
  }

  /** Return what is stored and exported. */
  record() {
    const { id, title, created, updated, system, leaf, messages } = this;
    return { id, title, created, updated, system, leaf, messages };
  }
}

const LONGEST_TITLE = 60;

function titleOf(question) {
  const line = question.trim().replace(/\s+/g, " ");
  return line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE - 1)}…` : line;
}
