// Chart of a search: the best score so far, and the individuals, in buckets and coloured by phase.
import { SCALES, WHOLE, axis, chart, colour, phaseColour, read, within } from "./charts.js";

const POINTS = 1000;

/** @param {HTMLElement} figure with `data-course`, the URL of the points, and other data of the search */
export function draw(figure) {
  const { course: url, individuals, scale: named } = figure.dataset;
  const scale = SCALES[named];
  const spans = JSON.parse(figure.dataset.spans);
  const kinds = [...new Set(spans.map((span) => span.kind))];
  const groups = kinds.length ? kinds : ["individuals"];
  const place = figure.querySelector(".plot");
  const readout = figure.querySelector("[data-readout]");
  const hint = readout.textContent;
  let curve = { first: [], low: [], high: [], at: [], best: [], width: 1 };
  let current = null;

  const group = (index) => {
    const kind = spans.find((span) => span.start <= index && index < span.stop)?.kind;
    return Math.max(0, groups.indexOf(kind));
  };
  const columns = () => {
    const owner = curve.at.map(group);
    const highs = groups.map((_, place) => curve.high.map((value, at) => (owner[at] === place ? scale.value(value) : null)));
    // The full model is scored after the page was loaded; its score is in a part of the page that is refreshed.
    const full = document.querySelector("#now [data-full]")?.dataset.full ?? "";
    return [curve.at, ...highs, curve.best.map(scale.value), curve.at.map(() => (full === "" ? null : scale.value(Number(full))))];
  };

  // A bar from the best score of each bucket to its worst.
  const bars = (plot) => {
    if (curve.width === 1) return;
    within(plot, (ctx, left, top) => {
      ctx.globalAlpha = 0.35;
      curve.at.forEach((index, at) => {
        ctx.strokeStyle = phaseColour(group(index));
        ctx.beginPath();
        ctx.moveTo(left(index), top(scale.value(curve.low[at])));
        ctx.lineTo(left(index), top(scale.value(curve.high[at])));
        ctx.stroke();
      });
    });
  };

  const operators = new Map();
  const describe = async (at) => {
    current = at;
    if (at === null) {
      readout.textContent = hint;
      return;
    }
    const index = curve.at[at];
    const score = `individual ${index}: ${scale.text(curve.high[at])}`;
    const bucket = curve.width > 1 ? ` (the best of ${curve.width} around it, the worst ${scale.text(curve.low[at])})` : "";
    const text = () => `${score}${operators.has(index) ? `, ${operators.get(index)}` : ""}${bucket}; click to open it`;
    readout.textContent = text();
    if (operators.has(index)) return;
    await new Promise((done) => setTimeout(done, 150)); // The pointer may be passing over it.
    if (current !== at) return;
    const found = await read(`/api${individuals}${index}`);
    if (!found) return;
    operators.set(index, `${found.individual.phase}: ${found.individual.operator}`);
    if (current === at) readout.textContent = text();
  };

  // The vertical range of the visible part, including the worse ends of the bars, which are no series.
  const range = (plot, least, most) => {
    const { min, max } = plot.scales.x;
    const visible = curve.low.filter((_, at) => curve.at[at] >= min && curve.at[at] <= max);
    const ends = visible.map(scale.value).filter((value) => value !== null);
    const low = Math.min(least ?? scale.empty[0], ...ends);
    const high = Math.max(most ?? scale.empty[1], ...ends);
    if (scale.distr === 3) return [low / 1.05, high * 1.05];
    const margin = 0.05 * (high - low) + 0.5;
    return [Math.max(0, low - margin), Math.min(100, high + margin)];
  };

  const options = () => ({
    scales: { x: { time: false }, y: { distr: scale.distr, range } },
    legend: { live: false },
    cursor: { y: false, focus: { prox: -1 } },
    axes: [axis("individual", { size: 34, incrs: WHOLE }), axis(scale.title, { size: 54 })],
    series: [
      { label: "individual" },
      ...groups.map((kind, place) => ({
        label: kind,
        paths: () => null,
        stroke: phaseColour(place),
        points: { show: true, size: 5, width: 0, fill: phaseColour(place), stroke: phaseColour(place) },
      })),
      { label: "best so far", stroke: colour("--ink"), width: 1.5, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } },
      { label: "full model", stroke: colour("--soft"), dash: [6, 4], points: { show: false } },
    ],
    hooks: { drawAxes: [bars], setCursor: [(plot) => { const at = plot.cursor.idx ?? null; if (at !== current) describe(at); }] },
  });

  const plot = chart(place, options, columns);
  let pressed = 0;
  place.addEventListener("pointerdown", (event) => (pressed = event.clientX));
  place.addEventListener("click", (event) => {
    const over = event.target.closest(".u-over");
    if (over && current !== null && Math.abs(event.clientX - pressed) < 4) location.assign(`${individuals}${curve.at[current]}`);
  });

  const load = async () => {
    const found = await read(`${url}?points=${POINTS}`);
    if (!found) return;
    curve = found;
    const shown = plot();
    const { min, max } = shown.scales.x;
    const zoomed = shown.data[0].length > 0 && (min > shown.data[0][0] || max < shown.data[0].at(-1));
    shown.setData(columns(), !zoomed);
    figure.dataset.drawn = String(curve.individuals);
    place.removeAttribute("aria-busy");
  };

  // One request at a time, and one more if there was news meanwhile.
  let busy = false;
  let again = false;
  const follow = async () => {
    again = true;
    if (busy) return;
    busy = true;
    while (again) {
      again = false;
      await load();
    }
    busy = false;
  };
  place.setAttribute("aria-busy", "true");
  figure.addEventListener("sse:cursors", follow);
  follow();
}
