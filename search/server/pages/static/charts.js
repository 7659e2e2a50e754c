// Shared by all charts: colours from the page's style sheet, and sizes that follow the page.

/** How scores are shown, by the name of their scale: `evaluators/scales.py`. Perplexities of candidates range over decades. */
export const SCALES = {
  percent: { title: "score in %", distr: 1, empty: [0, 100], value: (score) => 100 * score, text: (score) => `${(100 * score).toFixed(1)} %` },
  perplexity: {
    title: "perplexity, lower is better",
    distr: 3,
    empty: [1, 100],
    value: (score) => (score > 0 ? 1 / score : null),
    text: (score) => `${Number((1 / score).toPrecision(4))} ppl`,
  },
};

const COLOURS = ["--phase-1", "--phase-2", "--phase-3", "--phase-4"];

/** Value of a colour property of the style sheet. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The colour of the n-th phase. */
export function phaseColour(place) {
  return colour(COLOURS[place % COLOURS.length]);
}

/** Tick distances of an axis of integers. */
export const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((unit) => [unit, 2 * unit, 5 * unit]);

/** uPlot options of an axis in the page's colours. */
export function axis(label, options = {}) {
  return {
    label,
    stroke: colour("--soft"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 },
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    labelSize: 20,
    ...options,
  };
}

/** The JSON at a URL, or null if it can't be had. */
export async function read(url) {
  const answer = await fetch(url).catch(() => null);
  return answer?.ok ? answer.json() : null;
}

/** Paint on a uPlot chart, within its axes. */
export function within(plot, paint) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  paint(ctx, (x) => plot.valToPos(x, "x", true), (y) => plot.valToPos(y, "y", true));
  ctx.restore();
}

/**
 * Draw a chart that follows the page's width, and is drawn again when the colour scheme changes.
 * @param {HTMLElement} place element that the chart is put into
 * @param {() => object} options makes uPlot options without a size
 * @param {() => number[][]} data makes the columns
 * @returns {() => object} returns the current uPlot object
 */
export function chart(place, options, data) {
  const size = () => ({ width: Math.max(200, place.clientWidth), height: Math.max(220, Math.min(380, place.clientWidth * 0.5)) });
  let made = null;
  const build = () => {
    made?.destroy();
    made = new uPlot({ ...options(), ...size() }, data(), place);
  };
  build();
  new ResizeObserver(() => made.setSize(size())).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  return () => made;
}
