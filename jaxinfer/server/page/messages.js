// The list of messages: one element per message, brought up to date as the messages change.

import { showMarkdown } from "./markdown.js";

/** Makes an element; `text` is text, whatever it looks like. */
function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function makeButton(text, label, onClick) {
  const button = make("button", "plain", text);
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", onClick);
  return button;
}

/** Copies `text`; says so on the button for a moment. */
async function copy(text, button) {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    isCopied = copyByCommand(text); // pages without TLS have no clipboard
  }
  const before = (button.dataset.text ??= button.textContent);
  button.textContent = isCopied ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = before), 1500);
}

function copyByCommand(text) {
  const focused = document.activeElement;
  const area = make("textarea", "unseen");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}

export class MessageList {
  #list;
  #actions;
  #elements = new Map();

  /** `actions`: regenerate() answers the last question again, edit(text) asks another instead. */
  constructor(list, actions) {
    this.#list = list;
    this.#actions = actions;
    list.addEventListener("click", (event) => {
      const button = event.target.closest(".copy-code");
      if (button) copy(button.closest("figure").querySelector("code").textContent, button);
    });
  }

  /** Shows these messages; `isBusy` while the last one is being written. */
  show(messages, isBusy) {
    for (const [message, entry] of this.#elements) {
      if (messages.includes(message)) continue;
      entry.item.remove();
      this.#elements.delete(message);
    }
    for (const [index, message] of messages.entries()) {
      if (!this.#elements.has(message)) this.#add(message);
      const { item } = this.#elements.get(message);
      const there = this.#list.children[index];
      if (there !== item) this.#list.insertBefore(item, there ?? null);
    }
    const lastQuestion = messages.findLast((message) => message.role === "user");
    for (const message of messages) {
      const { item, update } = this.#elements.get(message);
      const isLast = message === messages.at(-1) || message === lastQuestion;
      item.classList.toggle("busy", isBusy && message === messages.at(-1));
      item.classList.toggle("last", isLast && !isBusy);
      update();
    }
  }

  /** Shows what has been added to `message`; returns the elements of its finished blocks. */
  update(message) {
    return this.#elements.get(message).update();
  }

  #add(message) {
    const item = make("li", `message ${message.role}`);
    const update = message.role === "user" ? this.#question(item, message) : answer(item, message);
    if (message.role !== "user") {
      item
        .querySelector(".actions")
        .append(
          makeButton("Copy", "Copy the answer", (event) => copy(message.content, event.target)),
          lastOnly(makeButton("Try again", "Answer again", () => this.#actions.regenerate())),
        );
    }
    this.#elements.set(message, { item, update });
  }

  #question(item, message) {
    const text = make("div", "text", message.content);
    const actions = make("div", "actions");
    actions.append(
      lastOnly(makeButton("Edit", "Edit the message", () => this.#edit(item, message))),
    );
    item.append(make("h2", "unseen", "You"), text, actions);
    return () => [];
  }

  #edit(item, message) {
    const form = make("form", "edit");
    const area = make("textarea");
    area.rows = 1;
    area.value = message.content;
    area.setAttribute("aria-label", "Edit the message");
    const buttons = make("div", "buttons");
    const send = make("button", "filled", "Send");
    const close = () => {
      form.remove();
      item.classList.remove("editing");
      item.querySelector(".actions .last-only").focus();
    };
    buttons.append(makeButton("Cancel", "Cancel", close), send);
    form.append(area, buttons);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() && this.#actions.edit(area.value.trim())) form.remove();
    });
    form.addEventListener("keydown", (event) => {
      if (event.target === area && isSendKey(event)) {
        event.preventDefault();
        form.requestSubmit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    item.classList.add("editing");
    item.append(form);
    growWithText(area);
    area.focus();
  }
}

/** Whether this key press sends what has been written. */
export function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

/** Makes a text field as high as its text, up to what the style sheet allows. */
export function growWithText(area) {
  const grow = () => {
    area.style.height = "auto";
    const border = area.offsetHeight - area.clientHeight;
    area.style.height = `${area.scrollHeight + border}px`;
  };
  area.addEventListener("input", grow);
  grow();
}

function lastOnly(button) {
  button.classList.add("last-only");
  return button;
}

/** Fills `item`; returns what brings it up to date. */
function answer(item, message) {
  const reasoning = make("details", "reasoning");
  const thoughts = make("div", "markdown");
  const summary = make("summary");
  reasoning.append(summary, thoughts);
  const waiting = make("p", "waiting", "Reading");
  const content = make("div", "markdown");
  const note = make("p", "note");
  const error = make("p", "error");
  const stats = make("span", "stats");
  const foot = make("div", "foot");
  foot.append(stats, make("div", "actions"));
  item.append(make("h2", "unseen", "Answer"), reasoning, waiting, content, note, error, foot);
  return () => {
    const isBusy = item.classList.contains("busy");
    reasoning.hidden = !message.reasoning;
    if (message.reasoning) showMarkdown(thoughts, message.reasoning);
    summary.textContent = isBusy && !message.content ? "Thinking" : "Thoughts";
    waiting.hidden = !isBusy || Boolean(message.content || message.reasoning);
    const count = showMarkdown(content, message.content);
    setText(note, message.note);
    setText(error, message.error);
    setText(stats, message.stats);
    item.classList.toggle("empty", !message.content);
    return [...content.children].slice(0, isBusy ? count - 1 : count);
  };
}

function setText(element, text) {
  element.hidden = !text;
  if (element.textContent !== text) element.textContent = text;
}
