// Chart of score against size: the front as a line, and the full model's score.
import { SCALES, axis, chart, colour, phaseColour } from "./charts.js";

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const short = (value) => {
  const [unit, name] = UNITS.find(([unit]) => value >= unit) ?? [1, ""];
  return `${Number((value / unit).toPrecision(4))}${name}`;
};

/** @param {HTMLElement} figure with `data-pareto`, the id of a table whose rows have `data-x` and `data-y` */
export function draw(figure) {
  const { pareto, axis: label, scale: named, full } = figure.dataset;
  const scale = SCALES[named];
  const rows = [...document.querySelectorAll(`#${pareto} tr[data-x]`)];
  const column = (name) => rows.map(({ dataset }) => Number(dataset[name]));
  const data = [column("x"), column("y"), rows.map(() => (full === undefined ? null : Number(full)))];

  // One size alone has no range, and the full model's would squeeze the candidates into a corner.
  const padded = (values) => () => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    if (values === scores && scale.distr === 3) return [low / 1.06, high * 1.06];
    const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [Math.max(0, low - margin), high + margin];
  };
  const scores = [...data[1], ...data[2]].filter((value) => value !== null);

  const plot = chart(
    figure.querySelector(".plot"),
    () => ({
      scales: { x: { time: false, range: padded(data[0]) }, y: { distr: scale.distr, range: padded(scores) } },
      legend: { show: false },
      cursor: { y: false, drag: { x: false } },
      axes: [axis(label, { size: 34, values: (_, splits) => splits.map(short) }), axis(scale.title, { size: 46 })],
      series: [
        {},
        {
          label: "score",
          stroke: phaseColour(0),
          width: 1.5,
          paths: uPlot.paths.stepped({ align: 1 }),
          points: { show: true, size: 8, fill: phaseColour(0), stroke: phaseColour(0) },
        },
        { label: "full model", stroke: colour("--ink"), dash: [6, 4], points: { show: false } },
      ],
      hooks: { setCursor: [(now) => rows.forEach((row, at) => row.classList.toggle("chosen", at === now.cursor.idx))] },
    }),
    () => data,
  );
  figure.querySelector(".plot").addEventListener("click", (event) => {
    const at = plot().cursor.idx;
    if (event.target.closest(".u-over") && at != null) location.assign(rows[at].querySelector("a").href);
  });
  figure.dataset.drawn = String(rows.length);
}
