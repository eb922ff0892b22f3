// What stays: the conversation and the settings in localStorage, the API key until the tab closes.

const NAME = "jaxinfer.chat";
const KEY_NAME = "jaxinfer.key";
const VERSION = 1;

/** Returns an answer of which nothing is known yet; a question has only `role` and `content`. */
export function emptyAnswer() {
  return {
    role: "assistant",
    content: "",
    reasoning: "",
    model: "", // that gave it
    stats: "", // a line about its tokens
    note: "", // why it is shorter than it could be
    error: "",
  };
}

/** Returns {model, settings, messages}; empty where nothing fit is stored. */
export function load() {
  let stored = null;
  try {
    stored = JSON.parse(localStorage.getItem(NAME));
  } catch {
    // No storage, or somebody else wrote there: start anew.
  }
  if (stored?.version !== VERSION) stored = {};
  return {
    model: text(stored.model),
    settings: Object.fromEntries(
      Object.entries(stored.settings ?? {}).filter(([, value]) => typeof value === "string"),
    ),
    messages: Array.isArray(stored.messages) ? stored.messages.map(message).filter(Boolean) : [],
  };
}

function text(value) {
  return typeof value === "string" ? value : "";
}

function message(value) {
  if (value?.role === "user") return { role: "user", content: text(value.content) };
  if (value?.role !== "assistant") return null;
  const read = emptyAnswer();
  for (const name of Object.keys(read)) read[name] = text(value[name]);
  return read;
}

/** Keeps the state; what does not fit is not kept, and the page goes on without. */
export function save({ model, settings, messages }) {
  try {
    localStorage.setItem(NAME, JSON.stringify({ version: VERSION, model, settings, messages }));
  } catch {
    // Full, or not allowed.
  }
}

/** Returns the API key, or "". */
export function loadKey() {
  try {
    return sessionStorage.getItem(KEY_NAME) ?? "";
  } catch {
    return "";
  }
}

/** Keeps the API key; "" forgets it. */
export function saveKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY_NAME, key);
    else sessionStorage.removeItem(KEY_NAME);
  } catch {
    // It is asked for again after a reload.
  }
}
