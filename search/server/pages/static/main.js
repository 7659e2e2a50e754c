// What htmx's attributes don't say: whether the page is live, what a part keeps when it is fetched again, and what
// the server answers to buttons.

document.documentElement.classList.add("js");

const byId = (id) => document.getElementById(id);
const say = (id, text) => {
  const said = byId(id);
  if (said && said.textContent !== text) said.textContent = text;
};

// News.

let source = null;
document.addEventListener("htmx:sseOpen", (event) => {
  source = event.detail.source;
  say("news", "- live");
  if (document.hidden) source.close();
});
document.addEventListener("htmx:sseError", async (event) => {
  source = event.detail.source;
  say("news", "- not live: the server doesn't answer");
  if (source.readyState !== EventSource.CLOSED) return;
  // An event source doesn't tell why it was refused.
  const answer = await fetch(source.url).catch(() => null);
  answer?.body?.cancel();
  if (answer?.status === 401) say("news", "- not live: signed out");
});
// A hidden page holds no connection, of which browsers have few for a server; htmx connects again after an error.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else if (source?.readyState === EventSource.CLOSED) source.dispatchEvent(new Event("error"));
});

// Parts: what is the same isn't put in place again; else what has the focus, what is open and what is typed stays.

const shown = new WeakMap();
let kept = null;
const state = (part) => [...(part?.querySelectorAll("[data-say] > *") ?? [])].map((each) => each.textContent.trim()).join(", ");
document.addEventListener("htmx:beforeSwap", ({ detail }) => {
  const { target, xhr, serverResponse } = detail;
  if (xhr.status === 401) {
    detail.shouldSwap = false;
    location.reload(); // The page that comes asks to sign in, and leads back here.
  }
  if (shown.get(target) === serverResponse) detail.shouldSwap = false;
  shown.set(target, serverResponse);
  const active = target.contains(document.activeElement) ? document.activeElement : null;
  kept = {
    typed: active instanceof HTMLInputElement ? active : null,
    open: [...target.querySelectorAll("details[open][id]")].map((each) => each.id),
    scrolled: [...target.querySelectorAll(".wide")].map((each) => each.scrollLeft),
    state: state(target),
  };
});
document.addEventListener("htmx:afterSwap", ({ detail, target }) => {
  if (kept.typed?.id && byId(kept.typed.id)) byId(kept.typed.id).value = kept.typed.value;
  for (const id of kept.open) byId(id)?.setAttribute("open", "");
  [...target.querySelectorAll(".wide")].forEach((each, place) => (each.scrollLeft = kept.scrolled[place] ?? 0));
  // Told once also to those who can't see it, not each time that it is drawn.
  const after = state(target);
  if (kept.state && after && kept.state !== after) say("said", `now: ${after}`);
  if (target.id === "answer") mark(byId("launching"), target.querySelector("[role=alert]")?.textContent ?? "");
});

/** Mark the fields of a form that a text names. */
function mark(form, text) {
  for (const field of form.querySelectorAll("input:not([type=checkbox]), select, textarea")) {
    const named = new RegExp(`(^|[\\s"'])${field.name.replaceAll(".", "\\.")}([\\s:]|$)`);
    if (named.test(text)) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

// Buttons that ask the API for something, which answers with JSON.

const asksApi = ({ detail }) => detail.pathInfo.requestPath.startsWith("/api/");
document.addEventListener("htmx:beforeRequest", (event) => asksApi(event) && say("said", "asking …"));
document.addEventListener("htmx:sendError", (event) => asksApi(event) && say("said", "the server doesn't answer"));
document.addEventListener("htmx:afterOnLoad", (event) => {
  if (!asksApi(event)) return;
  const { status, response } = event.detail.xhr;
  const found = JSON.parse(response);
  if (status >= 400) say("said", `refused: ${found.detail}`);
  else if (found?.process) say("said", `started as process ${found.process}`);
  else say("said", found?.desired_state && found.alive ? "asked; the driver does so within seconds" : "done");
});

for (const [selector, module] of [["[data-course]", "./course.js"], ["[data-pareto]", "./pareto.js"]]) {
  const figure = document.querySelector(selector);
  if (figure) (await import(module)).draw(figure);
}
