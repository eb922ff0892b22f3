// What the page asks its server for. Addresses are relative: a proxy may serve both below a path.

const MODELS = "v1/models";
const CHAT = "v1/chat/completions";

/** A failed request. `status` is 0 where no reply came; `retryAfterS` is null where none was named. */
export class ApiError extends Error {
  constructor(message, { status = 0, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

async function ask(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached. Is it running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const retryAfter = parseFloat(response.headers.get("Retry-After"));
  const details = {
    status: response.status,
    retryAfterS: Number.isFinite(retryAfter) ? retryAfter : null,
  };
  let message = null;
  try {
    message = messageOf(await response.json());
  } catch {
    // Not JSON: something between this page and the server has answered.
  }
  return new ApiError(message ?? `The server answered ${response.status}.`, details);
}

function messageOf(body) {
  const message = body?.error?.message;
  return typeof message === "string" && message ? message : null;
}

/** Returns the models, as {id, status}. */
export async function listModels(key) {
  const body = await (await ask(MODELS, key)).json();
  return body.data;
}

/** Yields the chunks of an answer; throws an ApiError if it does not come to its end. */
export async function* streamChat(body, key, signal) {
  const response = await ask(CHAT, key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    }),
    signal,
  });
  for await (const data of readEvents(response.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(messageOf(chunk) ?? "The answer broke off.");
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

/** Yields the data of server-sent events. */
async function* readEvents(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        // One line is one event here, and comments keep the connection alive.
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
    throw new ApiError("The connection to the server broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
