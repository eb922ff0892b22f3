// The page: what is typed is asked, and the answer is shown while it is written.

import { ApiError, listModels, streamChat } from "./api.js";
import { withKey } from "./key_dialog.js";
import { growWithText, isSendKey, MessageList } from "./messages.js";
import { Settings } from "./settings.js";
import { Speaker } from "./speaker.js";
import { Stopwatch } from "./stopwatch.js";
import { emptyAnswer, load, save } from "./store.js";

const NEAR_END_PX = 60;
const UNDO_MS = 8000;
const RETRY_S = 2;

const byId = (id) => document.getElementById(id);
const [prompt, send, stop] = ["prompt", "send", "stop"].map(byId);
const [scroller, toEnd, toast] = ["scroller", "to-end", "toast"].map(byId);
const modelPicker = byId("model");

const state = load();
const speaker = new Speaker(byId("spoken"));
const list = new MessageList(byId("messages"), { regenerate, edit });
const settings = new Settings(state.settings, (values) => {
  state.settings = values;
  save(state);
});
let running = null; // the AbortController of the answer being written

// --- messages

function show() {
  list.show(state.messages, running !== null);
  byId("welcome").hidden = state.messages.length > 0;
  byId("new-chat").disabled = state.messages.length === 0;
  send.hidden = running !== null;
  stop.hidden = running === null;
  send.disabled = !prompt.value.trim();
}

/** Returns the messages to send: the questions that got no answer but an error are left out. */
function conversation() {
  const sent = [];
  for (const [index, message] of state.messages.entries()) {
    const next = state.messages[index + 1];
    const isUnanswered = message.role === "user" && next && !next.content;
    if (message.content && !isUnanswered) {
      sent.push({ role: message.role, content: message.content });
    }
  }
  const system = settings.systemPrompt;
  return system ? [{ role: "system", content: system }, ...sent] : sent;
}

function ask(text) {
  if (running || !settings.check()) return false;
  state.messages.push({ role: "user", content: text });
  answer();
  return true;
}

function regenerate() {
  if (running || !settings.check()) return;
  dropLastAnswer();
  answer();
  focusPrompt();
}

function edit(text) {
  if (running || !settings.check()) return false;
  dropLastAnswer();
  state.messages.pop();
  ask(text);
  focusPrompt();
  return true;
}

function dropLastAnswer() {
  if (state.messages.at(-1)?.role === "assistant") state.messages.pop();
}

async function answer() {
  const body = { ...settings.sampling, messages: conversation() };
  if (state.model) body.model = state.model;
  const message = emptyAnswer();
  state.messages.push(message);
  const controller = (running = new AbortController());
  const watch = new Stopwatch();
  speaker.start();
  show();
  scrollToEnd();
  save(state);
  const refresh = refresher(message);
  try {
    await withKey(async (key) => {
      for await (const chunk of streamChat(body, key, controller.signal)) {
        take(message, chunk, watch);
        refresh.soon();
      }
    });
  } catch (error) {
    if (controller.signal.aborted) message.note = "Stopped.";
    else message.error = explain(error);
  }
  if (running === controller) running = null;
  if (!state.messages.includes(message)) return;
  refresh.now();
  followingEnd(show);
  speaker.finish(list.update(message), message.note || message.error || "End of the answer.");
  save(state);
  if (modelPicker.disabled && !message.error) loadModels(); // the key is known now
}

function take(message, chunk, watch) {
  const choice = chunk.choices?.[0];
  message.model = chunk.model ?? message.model;
  message.content += choice?.delta?.content ?? "";
  message.reasoning += choice?.delta?.reasoning_content ?? "";
  if (choice?.finish_reason === "length") message.note = "Ended at the limit of tokens.";
  if (chunk.usage) watch.count(chunk.usage.completion_tokens);
  message.stats = [message.model, ...watch.report()].join(" · ");
}

function explain(error) {
  if (error instanceof ApiError) return error.message;
  console.error(error);
  return "The page could not read the server's answer.";
}

/** Shows a message at most once a frame, and at once when told so: hidden tabs have no frames. */
function refresher(message) {
  let frame = null;
  const now = () => {
    cancelAnimationFrame(frame);
    frame = null;
    if (!state.messages.includes(message)) return; // a new chat has begun
    followingEnd(() => speaker.say(list.update(message)));
  };
  return { now, soon: () => (frame ??= requestAnimationFrame(now)) };
}

// --- scrolling

function isNearEnd() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
}

function scrollToEnd() {
  scroller.scrollTop = scroller.scrollHeight;
  showToEnd();
}

/** Changes what is shown; who was at its end is there afterwards. */
function followingEnd(change) {
  const wasAtEnd = isNearEnd();
  change();
  if (wasAtEnd) scrollToEnd();
  else showToEnd();
}

function showToEnd() {
  toEnd.hidden = isNearEnd();
}

// --- models

let modelsTimer = null;

async function loadModels() {
  try {
    showModels(await withKey(listModels));
    showStatus("");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const isLoading = error.status === 503;
    showStatus(isLoading ? `${error.message}: this page tries again by itself.` : error.message);
    if (isLoading || error.status === 0) {
      clearTimeout(modelsTimer);
      modelsTimer = setTimeout(loadModels, 1000 * (error.retryAfterS ?? RETRY_S));
    }
  }
}

function showModels(models) {
  if (!models.some((model) => model.id === state.model)) {
    state.model = (models.find(isLoaded) ?? models[0])?.id ?? "";
  }
  const options = models.map((model) => {
    const text = isLoaded(model) ? model.id : `${model.id} (${model.status})`;
    return new Option(text, model.id);
  });
  modelPicker.replaceChildren(...options);
  modelPicker.value = state.model;
  modelPicker.disabled = models.length === 0;
}

function isLoaded(model) {
  return model.status === undefined || model.status === "loaded";
}

function showStatus(text) {
  byId("status").textContent = text;
  byId("status").hidden = !text;
}

// --- a new chat, and its undoing

let forgotten = [];
let toastTimer = null;

function newChat() {
  running?.abort();
  running = null;
  forgotten = state.messages;
  state.messages = [];
  show();
  save(state);
  toast.hidden = false;
  toast.firstElementChild.textContent = "Chat cleared."; // after it can be seen, to be read aloud
  clearTimeout(toastTimer);
  toastTimer = setTimeout(hideToast, UNDO_MS);
  focusPrompt();
}

function undo() {
  state.messages = [...forgotten, ...state.messages];
  hideToast();
  show();
  scrollToEnd();
  save(state);
  focusPrompt();
}

function hideToast() {
  toast.firstElementChild.textContent = "";
  toast.hidden = true;
}

// --- events

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || !ask(text)) return;
  prompt.value = "";
  prompt.dispatchEvent(new Event("input"));
});
prompt.addEventListener("input", () => (send.disabled = !prompt.value.trim()));
prompt.addEventListener("keydown", (event) => {
  if (!isSendKey(event)) return;
  event.preventDefault();
  if (!running) byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stopAnswer();
});
stop.addEventListener("click", stopAnswer);
byId("new-chat").addEventListener("click", newChat);
toast.querySelector("button").addEventListener("click", undo);
toEnd.addEventListener("click", scrollToEnd);
scroller.addEventListener("scroll", showToEnd, { passive: true });
modelPicker.addEventListener("change", () => {
  state.model = modelPicker.value;
  save(state);
});
byId("examples").addEventListener("click", (event) => {
  const example = event.target.closest("button");
  if (example) ask(example.textContent);
});
document.addEventListener("visibilitychange", () => {
  // Models may have been loaded and unloaded meanwhile.
  if (!document.hidden && !modelPicker.disabled) loadModels();
});
window.addEventListener("pagehide", () => save(state));

/** On a touch screen the keyboard would come up over the page. */
function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) prompt.focus();
}

function stopAnswer() {
  if (!running) return;
  running.abort();
  focusPrompt();
}

growWithText(prompt);
show();
scrollToEnd();
focusPrompt();
loadModels();
