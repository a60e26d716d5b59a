// The server's API as this page uses it.

export class ServerError extends Error {
  /** `code` is the API's, "unreachable" where no answer came, or null. */
  constructor(message, code = null, status = 0) {
    super(message);
    Object.assign(this, { code, status });
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", "unreachable");
  }
  if (response.ok) return response;
  const told = (await response.json().catch(() => null))?.error;
  throw new ServerError(
    told?.message ?? `The server answers with status ${response.status}.`,
    told?.code ?? null,
    response.status,
  );
}

/** Return the entry of the model that is served. */
export async function fetchModel(key) {
  return (await (await send("v1/models", { headers: headers(key) })).json()).data[0];
}

/** Yield the events of a streamed answer to `body`. */
export async function* streamChat(body, key, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ;) {
    const { value, done } = await reader.read().catch(error => {
      if (signal.aborted) throw error;
      return { done: true };
    });
    if (done) throw new ServerError("The connection was lost.", "unreachable");
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield checked(JSON.parse(line.slice(6)));
    }
  }
}

function checked(event) {
  if (event.error) throw new ServerError(event.error.message, event.error.code);
  return event;
}
