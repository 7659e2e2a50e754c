// Buttons and forms that ask the server for something: `data-post` is where, `data-number` and `data-text` what is sent.
import { refreshStarted, watchStarted } from "./started.js";

/** Let every such button and form on the page do its work, also those that come later. */
export function steer() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-post]");
    if (button && (!button.dataset.confirm || confirm(button.dataset.confirm))) post(button, button.dataset.post, {});
  });
  document.addEventListener("submit", (event) => {
    const form = event.target.closest("form[data-post]");
    if (!form) return;
    event.preventDefault();
    const name = form.dataset.number;
    post(event.submitter ?? form, form.dataset.post, name ? { [name]: Number(new FormData(form).get(name)) } : {});
  });
}

async function post(button, url, body) {
  const said = document.getElementById("said");
  button.disabled = true;
  said.textContent = "asking …";
  try {
    const answer = await fetch(url, {
      method: "POST",
      headers: { "X-Moevolve": "1", "content-type": "application/json", accept: "application/json" },
      body: JSON.stringify(body),
    });
    const found = await answer.json();
    said.textContent = answer.ok ? described(found) : `refused: ${found.detail}`;
    if (found && "process" in found) {
      await refreshStarted();
      watchStarted();
    }
  } catch {
    said.textContent = "the server doesn't answer";
  }
  button.disabled = false;
}

/** What an answer says: of a driver that was asked, or of a process that was started. */
function described(found) {
  if (found && "process" in found) return `started as process ${found.process}`;
  if (found && "wanted" in found) return found.alive ? "asked; the driver does so within seconds" : "done";
  return "done";
}
