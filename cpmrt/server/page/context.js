// What of a conversation fits into the model's context.

const LARGEST_RESERVE = 1024;

/**
 * Return the turns of a path that ends with a question: each a question with its answer, the last without one.
 * Questions that were never answered are left out.
 */
export function turnsOf(path) {
  const turns = [];
  for (const { role, content } of path) {
    if (role === "user" || !turns.length) turns.push([]);
    turns.at(-1).push({ role, content });
  }
  return turns.filter(
    (turn, index) => index === turns.length - 1 || turn.some(({ role, content }) => role !== "user" && content),
  );
}

/** Return the messages of a request without the `leftOut` oldest turns. The system prompt always stays. */
export function messagesOf(system, turns, leftOut) {
  return [...(system.trim() ? [{ role: "system", content: system }] : []), ...turns.slice(leftOut).flat()];
}

/**
 * Estimate how many of the oldest turns to leave out so that room for an answer stays. What the last answer cost tells
 * how many tokens a character has. Where nothing is known this returns 0, and the server refuses what is too long.
 */
export function turnsToLeaveOut({ path, system, contextLength, maxTokens }) {
  const last = path.findLast(message => message.role === "assistant" && message.speed?.prompt);
  if (!last || !contextLength) return last?.leftOut ?? 0;
  const turns = turnsOf(path),
    before = turnsOf(path.slice(0, path.indexOf(last)));
  const perCharacter = last.speed.prompt / Math.max(1, length(messagesOf(system, before, last.leftOut ?? 0)));
  const reserve = Math.min(maxTokens || LARGEST_RESERVE, contextLength / 4);
  let leftOut = last.leftOut ?? 0;
  const isTooLong = () => length(messagesOf(system, turns, leftOut)) * perCharacter + reserve > contextLength;
  while (leftOut < turns.length - 1 && isTooLong()) leftOut++;
  return leftOut;
}

function length(messages) {
  return messages.reduce((sum, message) => sum + message.content.length, 0);
}
