// The drawer of settings: fields of a form, each named as its parameter of the API.

const byId = (id) => document.getElementById(id);

export class Settings {
  #dialog = byId("settings");
  #form = this.#dialog.querySelector("form");
  #button = byId("open-settings");

  /** `onChange` is called with the values whenever one has changed. */
  constructor(values, onChange) {
    for (const field of this.#fields()) field.value = values[field.name] ?? "";
    this.#form.addEventListener("input", () => this.#changed(onChange));
    this.#button.addEventListener("click", () => this.open());
    byId("reset-settings").addEventListener("click", () => {
      for (const field of this.#fields()) field.value = "";
      this.#changed(onChange);
    });
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close();
    });
    this.#mark();
  }

  open() {
    this.#dialog.showModal();
  }

  /** Whether every field holds what the API takes; if not, the first that does not is shown. */
  check() {
    if (this.#form.checkValidity()) return true;
    this.open();
    this.#form.reportValidity();
    return false;
  }

  /** The system prompt, or "". */
  get systemPrompt() {
    return this.#form.elements.system.value.trim();
  }

  /** Sampling parameters that are set, by name. */
  get sampling() {
    const numbers = this.#fields().filter((field) => field.type === "number" && field.value);
    return Object.fromEntries(numbers.map((field) => [field.name, field.valueAsNumber]));
  }

  #fields() {
    return [...this.#form.elements].filter((field) => field.name);
  }

  #changed(onChange) {
    this.#mark();
    onChange(Object.fromEntries(this.#fields().map((field) => [field.name, field.value])));
  }

  #mark() {
    const count = this.#fields().filter((field) => field.value).length;
    this.#button.classList.toggle("marked", count > 0);
    this.#button.setAttribute("aria-label", count ? `Settings, ${count} changed` : "Settings");
  }
}
