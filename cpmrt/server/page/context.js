// Chooses the turns of a conversation that fit into the model's context.

const LARGEST_RESERVE = 1024;
const TYPICAL = { tokens: 120, characters: 300 };

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
 * Estimate how many of the oldest turns to leave out so that room for an answer stays: from the tokens of the last
 * prompt, and what was written since. Where nothing is known this is 0, and the server refuses what is too long.
 */
export function turnsToLeaveOut({ path, system, contextLength, maxTokens }) {
  const last = path.findLast(message => message.role === "assistant" && message.speed?.prompt);
  let leftOut = last?.leftOut ?? 0;
  if (!last || !contextLength) return leftOut;
  const turns = turnsOf(path);
  const known = length(messagesOf(system, turnsOf(path.slice(0, path.indexOf(last))), leftOut));
  // Short prompts are mostly the template's own tokens, so that they say little of what a character costs.
  const perCharacter = (last.speed.prompt + TYPICAL.tokens) / (known + TYPICAL.characters);
  const reserve = Math.min(maxTokens || LARGEST_RESERVE, contextLength / 4);
  const tokens = () => last.speed.prompt + (length(messagesOf(system, turns, leftOut)) - known) * perCharacter;
  while (leftOut < turns.length - 1 && tokens() + reserve > contextLength) leftOut++;
  return leftOut;
}

function length(messages) {
  return messages.reduce((sum, message) => sum + message.content.length, 0);
}
