// An answer that is being written. It belongs to its conversation, whatever conversation is shown meanwhile.

import { ServerError, streamChat } from "./api.js";
import { messagesOf, turnsOf, turnsToLeaveOut } from "./context.js";

export class Generation {
  /**
   * Write `answer`, an empty message of `conversation`, which follows the question that it answers. `request` has
   * `fields` and `key` of the settings and the `contextLength` of the model. `onChange()` is called for each piece.
   */
  constructor(conversation, answer, request, onChange) {
    Object.assign(this, { conversation, answer, request, onChange });
    this.abort = new AbortController();
    // What belongs to this request is taken now: nothing that is opened later can come into it.
    this.system = conversation.system;
    this.path = conversation.pathTo(conversation.message(answer.parent));
    this.isThinking = false;
  }

  stop() {
    this.abort.abort();
  }

  /** Return when the answer has ended. What went wrong stands in the answer. */
  async run() {
    const { answer } = this;
    try {
      await this.#writeWhatFits();
    } catch (error) {
      if (this.abort.signal.aborted) answer.finish = "stopped";
      else answer.problem = error instanceof ServerError ? error.message : `The page failed: ${error.message}`;
      this.errorCode = error.code;
    }
    this.isThinking = false;
  }

  async #writeWhatFits() {
    const { answer, path, system, request } = this,
      turns = turnsOf(path);
    const { contextLength, fields } = request;
    answer.leftOut = turnsToLeaveOut({ path, system, contextLength, maxTokens: fields.max_tokens });
    for (;;) {
      try {
        return await this.#write(messagesOf(system, turns, answer.leftOut));
      } catch (error) {
        if (error.code !== "context_length_exceeded" || answer.leftOut >= turns.length - 1) throw error;
        answer.leftOut++;
      }
    }
  }

  async #write(messages) {
    const { request, abort, answer } = this,
      begun = performance.now();
    let first = 0,
      last = 0,
      pieces = 0,
      usage = null;
    try {
      for await (const event of streamChat({ ...request.fields, messages }, request.key, abort.signal)) {
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        answer.finish = choice?.finish_reason ?? answer.finish;
        if (!this.#take(choice?.delta)) continue;
        last = performance.now();
        first ||= last;
        pieces++;
        answer.speed = { tokens: pieces, firstMs: first - begun, restMs: last - first };
        this.onChange();
      }
    } finally {
      if (usage) answer.speed = { ...answer.speed, ...figures(usage) };
    }
  }

  /** Add a piece to the answer; returns false if it has no text. */
  #take(delta) {
    const { content, reasoning_content: thought } = delta ?? {};
    if (thought) this.answer.thoughts = (this.answer.thoughts ?? "") + thought;
    if (content) this.answer.content += content;
    if (thought || content) this.isThinking = !content;
    return Boolean(thought || content);
  }
}

function figures(usage) {
  const { completion_tokens: tokens, prompt_tokens: prompt, prompt_tokens_details: details } = usage;
  return { tokens, prompt, cached: details?.cached_tokens ?? 0 };
}
