// Conversations as a file: written for the person, and read back with care, as anybody can write such a file.

import { newId } from "./conversation.js";
import { element } from "./dom.js";

const FORMAT = "cpmrt-conversations";
const VERSION = 1;

/** Let the browser save conversations as a file. */
export function saveFile(records, name) {
  const text = JSON.stringify({ format: FORMAT, version: VERSION, conversations: records }, null, 1);
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", {
    href: address,
    download: `${
      name
        .replace(/[^\p{L}\p{N} _-]/gu, "")
        .slice(0, 60)
        .trim() || "conversations"
    }.json`,
  }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/**
 * Return the conversations of a file's text, with ids of their own. Throws an Error that says what is wrong with it.
 */
export function readFile(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This is no JSON file.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations))
    throw new Error("This file holds no exported conversations.");
  if (file.version !== VERSION)
    throw new Error(`This file has version ${file.version}; this page reads version ${VERSION}.`);
  return file.conversations.map(conversation);
}

function conversation(given, index) {
  const where = `Conversation ${index + 1} of the file`;
  if (!Array.isArray(given?.messages)) throw new Error(`${where} has no messages.`);
  const ids = new Map(),
    messages = given.messages.map(each => message(each, ids, where));
  return {
    id: newId(),
    title: string(given.title),
    created: time(given.created),
    updated: time(given.updated),
    system: string(given.system),
    leaf: ids.get(given.leaf) ?? messages.at(-1)?.id ?? null,
    messages,
  };
}

/** Return a checked message. Parents come first, so that no message can be its own ancestor. */
function message(given, ids, where) {
  const { id, parent, role, content } = given ?? {};
  const isKnown = parent === null || ids.has(parent);
  if (
    typeof id !== "string" ||
    ids.has(id) ||
    !isKnown ||
    !["user", "assistant"].includes(role) ||
    typeof content !== "string"
  ) {
    throw new Error(`${where} has a message that is not one of this format.`);
  }
  ids.set(id, newId());
  const read = { id: ids.get(id), parent: parent === null ? null : ids.get(parent), role, content };
  for (const name of ["thoughts", "finish", "problem"]) if (typeof given[name] === "string") read[name] = given[name];
  for (const name of ["leftOut", "lengthLimit"]) if (Number.isInteger(given[name])) read[name] = given[name];
  if (given.speed && typeof given.speed === "object") {
    read.speed = Object.fromEntries(Object.entries(given.speed).filter(([, value]) => Number.isFinite(value)));
  }
  return read;
}

const string = value => (typeof value === "string" ? value : "");
const time = value => (Number.isFinite(value) ? value : Date.now());
