// Conversations in the browser's IndexedDB: heads (id, title, updated) for the list, and whole conversations by id.

const NAME = "cpmrt";
const HEADS = "heads";
const CONVERSATIONS = "conversations";

/** Open the store of this browser, or one that lasts as long as the page where the browser gives none. */
export async function openStore() {
  try {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      for (const store of [HEADS, CONVERSATIONS]) request.result.createObjectStore(store, { keyPath: "id" });
    };
    return new BrowserStore(await resultOf(request));
  } catch {
    return new MemoryStore();
  }
}

const headOf = ({ id, title, updated }) => ({ id, title, updated });

class BrowserStore {
  isKept = true;

  constructor(database) {
    this.database = database;
  }

  heads() {
    return resultOf(this.database.transaction(HEADS).objectStore(HEADS).getAll());
  }

  get(id) {
    return resultOf(this.database.transaction(CONVERSATIONS).objectStore(CONVERSATIONS).get(id));
  }

  put(record) {
    return this.#write((conversations, heads) => {
      conversations.put(record);
      heads.put(headOf(record));
    });
  }

  remove(id) {
    return this.#write((conversations, heads) => {
      conversations.delete(id);
      heads.delete(id);
    });
  }

  #write(change) {
    const transaction = this.database.transaction([CONVERSATIONS, HEADS], "readwrite");
    change(transaction.objectStore(CONVERSATIONS), transaction.objectStore(HEADS));
    transaction.commit(); // so that it is kept also when the page goes away now
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

class MemoryStore {
  isKept = false;
  #records = new Map();

  async heads() {
    return [...this.#records.values()].map(headOf);
  }

  async get(id) {
    return structuredClone(this.#records.get(id));
  }

  async put(record) {
    this.#records.set(record.id, structuredClone(record));
  }

  async remove(id) {
    this.#records.delete(id);
  }
}

function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
