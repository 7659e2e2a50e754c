// What htmx's attributes can't express: the state of the connection, what a part keeps when it is replaced, and the
// API's answers to buttons.

document.documentElement.classList.add("js");

const byId = (id) => document.getElementById(id);
const setText = (id, text) => {
  const element = byId(id);
  if (element && element.textContent !== text) element.textContent = text;
};

// News.

let source = null;
document.addEventListener("htmx:sseOpen", (event) => {
  source = event.detail.source;
  setText("news", "- live");
  if (document.hidden) source.close();
});
document.addEventListener("htmx:sseError", async (event) => {
  source = event.detail.source;
  setText("news", "- not live: the server doesn't answer");
  if (source.readyState !== EventSource.CLOSED) return;
  // An event source doesn't report why it was refused.
  const answer = await fetch(source.url).catch(() => null);
  answer?.body?.cancel();
  if (answer?.status === 401) setText("news", "- not live: signed out");
});
// A hidden page gives up its connection, since browsers allow few per server; htmx reconnects after an error.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else if (source?.readyState === EventSource.CLOSED) source.dispatchEvent(new Event("error"));
});

// Parts: unchanged ones aren't replaced; others keep the focused text, open details and scroll positions.

const responses = new WeakMap();
let kept = null;
let uploaded = ""; // id of the checkbox of a file that was sent, until it is ticked
const state = (part) => [...(part?.querySelectorAll("[data-say] > *") ?? [])].map((each) => each.textContent.trim()).join(", ");
document.addEventListener("htmx:beforeSwap", ({ detail }) => {
  const { target, xhr, serverResponse } = detail;
  if (xhr.status === 401) {
    detail.shouldSwap = false;
    location.reload(); // This shows the sign-in page, which leads back here.
  }
  if (responses.get(target) === serverResponse) detail.shouldSwap = false;
  responses.set(target, serverResponse);
  const active = target.contains(document.activeElement) ? document.activeElement : null;
  kept = {
    typed: active instanceof HTMLInputElement ? active : null,
    open: [...target.querySelectorAll("details[open][id]")].map((each) => each.id),
    ticked: [...target.querySelectorAll("input[type=checkbox][id]:checked")].map((each) => each.id),
    scrolled: [...target.querySelectorAll(".wide")].map((each) => each.scrollLeft),
    state: state(target),
  };
});
document.addEventListener("htmx:afterSwap", ({ detail, target }) => {
  if (kept.typed?.id && byId(kept.typed.id)) byId(kept.typed.id).value = kept.typed.value;
  for (const id of kept.ticked) if (byId(id)) byId(id).checked = true;
  tickUploaded();
  for (const id of kept.open) byId(id)?.setAttribute("open", "");
  [...target.querySelectorAll(".wide")].forEach((each, place) => (each.scrollLeft = kept.scrolled[place] ?? 0));
  // Screen readers announce a change of state once, not every time the part is replaced.
  const after = state(target);
  if (kept.state && after && kept.state !== after) setText("said", `now: ${after}`);
  if (byId("answer")) mark(byId("launching"), byId("answer").querySelector("[role=alert]")?.textContent ?? "");
});

function tickUploaded() {
  if (!byId(uploaded)) return;
  byId(uploaded).checked = true;
  uploaded = "";
}

/** Mark the fields of a form that an error message begins with, as a setting or as an option, or names before a colon. */
function mark(form, text) {
  for (const field of form.querySelectorAll("input:not([type=checkbox]), select, textarea")) {
    const name = (field.name === "amount" ? form.elements.keep.value : field.name).replaceAll(".", "\\.");
    const named = new RegExp(`(^|error: )(--${name.replaceAll("_", "-")}|${name})[\\s:]|[\\s"']${name}:`);
    if (named.test(text)) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

// Buttons that send requests to the API, which answers with JSON.

const asksApi = ({ detail }) => detail.pathInfo.requestPath.startsWith("/api/");
document.addEventListener("htmx:beforeRequest", (event) => asksApi(event) && setText("said", "asking …"));
document.addEventListener("htmx:sendError", (event) => asksApi(event) && setText("said", "the server doesn't answer"));
document.addEventListener("htmx:afterOnLoad", (event) => {
  if (!asksApi(event)) return;
  const { status, response } = event.detail.xhr;
  const answer = JSON.parse(response);
  if (status >= 400) setText("said", `refused: ${answer.detail}`);
  else if (answer?.rows) {
    setText("said", `${answer.name} has ${answer.rows} rows and is ticked below`);
    uploaded = `file-${answer.name}`;
    const named = document.getElementById("named").value;
    if (named) document.getElementById("columns").value = named; // The shrink reads them again.
    tickUploaded(); // A file that was sent before has its checkbox, and its part isn't replaced.
  }
  else if (answer?.process) {
    setText("said", `started as process ${answer.process}`);
    htmx.trigger("body", "started");
  }
  else setText("said", answer?.desired_state && answer.alive ? "asked; the driver does so within seconds" : "done");
});

// A form with a file sends the file itself, to the address of its name.

htmx.defineExtension("file-body", {
  onEvent: (name, { detail }) => {
    if (name !== "htmx:configRequest") return;
    const { file, named } = detail.parameters;
    detail.path += encodeURIComponent(file.name) + (named ? `?columns=${encodeURIComponent(named)}` : "");
    detail.headers["Content-Type"] = "application/octet-stream";
  },
  encodeParameters: (_, parameters) => parameters.get("file"),
});

const charts = [["[data-course]", "./fitness_chart.js"], ["[data-pareto]", "./pareto_chart.js"]];
for (const [selector, module] of charts) {
  const figure = document.querySelector(selector);
  if (figure) (await import(module)).draw(figure);
}
