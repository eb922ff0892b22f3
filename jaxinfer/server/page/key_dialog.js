// Asks for the API key when the server wants one.

import { loadKey, saveKey } from "./store.js";

const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key");
const forget = document.getElementById("forget-key");
let key = loadKey();
let asking = null;

forget.addEventListener("click", () => setKey(""));
document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
setKey(key);

function setKey(value) {
  key = value;
  saveKey(value);
  forget.hidden = !value;
}

/**
 * Calls `request` with the key; asks for one, and calls again, for as long as the server refuses
 * and the user gives another. `request` must fail with an ApiError.
 */
export async function withKey(request) {
  while (true) {
    const used = key;
    try {
      return await request(used);
    } catch (error) {
      if (error.status !== 401) throw error;
      // Another request may have learned the key meanwhile.
      if (key === used && !(await askOnce(used))) throw error;
    }
  }
}

function askOnce(refused) {
  asking ??= askUser(refused).finally(() => (asking = null));
  return asking;
}

function askUser(refused) {
  document.getElementById("key-reason").textContent = refused
    ? "The server does not know this key."
    : "";
  input.value = "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const isGiven = dialog.returnValue === "use";
        if (isGiven) setKey(input.value.trim());
        input.value = "";
        resolve(isGiven);
      },
      { once: true },
    );
  });
}
