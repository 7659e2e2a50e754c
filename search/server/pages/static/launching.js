// The form that launches a search: what is typed goes to the server, and its answer stands beside the form.
import { pause, refreshStarted } from "./started.js";

/** Let a form check and launch what is typed in it. */
export function launchFrom(form) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const launches = event.submitter?.value === "launch";
    const buttons = form.querySelectorAll("button");
    buttons.forEach((each) => (each.disabled = true));
    complain(form, "");
    say(launches ? "asking …" : "checking …");
    try {
      const found = await ask(launches ? "/api/searches" : "/api/searches/check", asked(form));
      document.getElementById("plan").hidden = launches;
      if (launches) {
        say(`started as process ${found.process}; waiting for the search …`);
        await arrival(found.name);
      } else {
        say("");
        show(found);
      }
    } catch (error) {
      say("");
      document.getElementById("plan").hidden = true;
      complain(form, error instanceof Refusal ? error.message : "the server doesn't answer");
    }
    buttons.forEach((each) => (each.disabled = false));
  });
}

/** What the server, or this page, says is wrong with what is typed. */
class Refusal extends Error {}

/** What the form asks for: of settings those that differ from the run file's. */
function asked(form) {
  const typed = new FormData(form);
  const overrides = {};
  for (const field of form.querySelectorAll("[data-setting]")) {
    const value = field.value.trim();
    if (value !== field.dataset.given) overrides[field.dataset.setting] = plain(value);
  }
  for (const [place, line] of typed.get("further").split("\n").entries()) {
    if (!line.trim() || line.trim().startsWith("#")) continue;
    const [, key, value] = line.match(/^\s*([^=\s]+)\s*=\s*(.*?)\s*$/) ?? [];
    const wrong = (what) => new Refusal(`further settings, line ${place + 1}: ${what}`);
    if (!key) throw wrong("expected KEY = VALUE, for example genome.experts = 4");
    if (/^[[{]/.test(value)) throw wrong(`lists and mappings are set entry by entry, for example ${key}.0 = ...`);
    overrides[key] = plain(value);
  }
  const body = { configuration: form.dataset.launching, name: typed.get("name").trim(), overrides };
  if (typed.get("model")) body.model = typed.get("model");
  if (typed.has("tasks")) body.tasks = typed.getAll("tasks");
  return body;
}

/** A number, a truth value, nothing or a quoted text where it is written as one; any other text as it is. */
function plain(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

async function ask(url, body) {
  const answer = await fetch(url, {
    method: "POST",
    headers: { "X-Moevolve": "1", "content-type": "application/json", accept: "application/json" },
    body: JSON.stringify(body),
  });
  const found = await answer.json();
  if (!answer.ok) throw new Refusal(found.detail);
  return found;
}

/** Go to the page of a search that was launched as soon as there is one. */
async function arrival(name) {
  for (;;) {
    await refreshStarted();
    const row = document.querySelector(`#started [data-launch="${CSS.escape(name)}"]`);
    const link = row?.querySelector("a");
    if (link) {
      location.assign(link.href);
      return;
    }
    if (row && row.dataset.state !== "starting") {
      throw new Refusal(`${name} ${row.dataset.state}: ${row.lastElementChild.textContent.trim()}`);
    }
    await pause();
  }
}

function say(text) {
  document.getElementById("said").textContent = text;
}

/** Say what is wrong, and mark the fields that it names; nothing if there is no text. */
function complain(form, text) {
  const problem = document.getElementById("problem");
  problem.textContent = text;
  problem.hidden = !text;
  for (const field of form.querySelectorAll("input[id], select, textarea")) {
    const name = field.dataset.setting ?? field.name;
    const named = new RegExp(`(^|[\\s"'])${name.replaceAll(".", "\\.")}([\\s:]|$)`);
    if (field.type !== "checkbox" && named.test(text)) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

/** Show what would be launched. */
function show(plan) {
  const rows = facts(plan).flatMap(([name, value]) => [["dt", name], ["dd", value]]);
  const made = rows.map(([tag, text]) => Object.assign(document.createElement(tag), { textContent: text }));
  document.getElementById("plan-facts").replaceChildren(...made);
  const status = document.getElementById("plan-status");
  status.hidden = plan.status === null;
  status.textContent =
    `A search of this name and these settings is in the store, ${plan.status}: launching goes on with that one.`;
  document.getElementById("plan-yaml").textContent = plan.settings;
  const section = document.getElementById("plan");
  section.hidden = false;
  section.focus();
}

/** What is known of a plan, as names and values. */
function facts(plan) {
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
  const phases = plan.phases.map(({ kind, individuals, different }) =>
    `${number(individuals)} in ${kind}` + (different < individuals ? ` (at most ${number(different)} differ)` : ""));
  const found = [
    ["name", plan.name],
    ["individuals", phases.join(", then ")],
    ["at the end", `${plan.ranked} scored on dev, ${plan.tested} on test`],
  ];
  const full = plan.sizes[0]?.parameters;
  for (const { title, experts, active, parameters } of plan.sizes) {
    const share = parameters < full ? ` (${number(100 * parameters / full)} %)` : "";
    const count = parameters === null ? "parameters differ" : `${number(parameters)} parameters${share}`;
    const layers = experts ? `, ${experts} experts per layer, ${active} per token` : "";
    found.push([title === "full model" ? title : `${title} candidates`, count + layers]);
  }
  found.push(plan.weight_bytes === null
    ? ["sizes", "not known yet: the model is in no folder of the server's machine"]
    : ["weights", `${number(plan.weight_bytes / 2 ** 20)} MiB`]);
  return found;
}
