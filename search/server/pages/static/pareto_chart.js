// Chart of score against size: the front as a line, all candidates as cells, and models that were not searched as marks.
import { SCALES, axis, chart, colour, phaseColour, read, within } from "./charts.js";

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const short = (value) => {
  const [unit, name] = UNITS.find(([unit]) => value >= unit) ?? [1, ""];
  return `${Number((value / unit).toPrecision(4))}${name}`;
};

/** @param {HTMLElement} figure with `data-pareto` and `data-marks`, ids of tables whose rows have `data-x` and `data-y` */
export function draw(figure) {
  const { pareto, marks: marksId, candidates: url, axis: label, scale: named } = figure.dataset;
  const scale = SCALES[named];
  const rows = [...document.querySelectorAll(`#${pareto} tr[data-x]`)];
  const point = ({ dataset }) => ({ kind: dataset.kind, x: dataset.x === undefined ? null : Number(dataset.x), y: Number(dataset.y) });
  const front = rows.map(point);
  const marks = [...document.querySelectorAll(`#${marksId} tr[data-y]`)].map(point);
  const data = [front.map(({ x }) => x), front.map(({ y }) => y)];
  let cells = [];
  const place = figure.querySelector(".plot");

  // Marks and cells are no series, which need a common x: the ranges have to include them. The full model has a line of
  // its score; its size would squeeze the candidates of one budget into a corner.
  const padded = (name, floor) => () => {
    const candidates = [...front, ...marks.filter(({ kind }) => kind !== "full" || name === "y"), ...cells];
    const values = candidates.map((each) => each[name]).filter((value) => value !== null);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    if (name === "y" && scale.distr === 3) return [low / 1.06, high * 1.06];
    const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [Math.max(floor, low - margin), high + margin];
  };
  const drawCells = (plot) =>
    within(plot, (ctx, left, top) => {
      const pixel = devicePixelRatio;
      const most = Math.max(1, ...cells.map(({ count }) => count));
      ctx.fillStyle = colour("--soft");
      for (const { x, y, count } of cells) {
        ctx.globalAlpha = 0.15 + (0.6 * Math.log(1 + count)) / Math.log(1 + most);
        ctx.fillRect(left(x) - 1.5 * pixel, top(y) - 1.5 * pixel, 3 * pixel, 3 * pixel);
      }
    });
  const drawMarks = (plot) =>
    within(plot, (ctx, left, top) => {
      const pixel = devicePixelRatio;
      for (const { kind, x, y } of marks) {
        ctx.strokeStyle = ctx.fillStyle = kind === "full" ? colour("--ink") : phaseColour(kind === "random" ? 1 : 2);
        if (kind === "full") {
          ctx.setLineDash([6 * pixel, 4 * pixel]);
          ctx.beginPath();
          ctx.moveTo(plot.bbox.left, top(y));
          ctx.lineTo(plot.bbox.left + plot.bbox.width, top(y));
          ctx.stroke();
          ctx.setLineDash([]);
        }
        if (x === null) continue;
        ctx.beginPath();
        const [h, v, size] = [left(x), top(y), 4 * pixel];
        if (kind === "method") {
          ctx.moveTo(h, v - size);
          ctx.lineTo(h + size, v + size);
          ctx.lineTo(h - size, v + size);
          ctx.closePath();
        } else ctx.arc(h, v, 0.75 * size, 0, 2 * Math.PI);
        ctx.fill();
      }
    });

  const plot = chart(
    place,
    () => ({
      scales: { x: { time: false, range: padded("x", 0) }, y: { distr: scale.distr, range: padded("y", 0) } },
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
      ],
      hooks: {
        drawAxes: [drawCells],
        draw: [drawMarks],
        setCursor: [(now) => rows.forEach((row, at) => row.classList.toggle("chosen", at === now.cursor.idx))],
      },
    }),
    () => data,
  );
  place.addEventListener("click", (event) => {
    const at = plot().cursor.idx;
    if (event.target.closest(".u-over") && at != null) location.assign(rows[at].querySelector("a").href);
  });

  const load = async () => {
    const found = await read(url);
    if (!found) return;
    cells = found.candidates.map(({ size, score, candidates }) => ({ x: size * found.each, y: scale.value(score), count: candidates }));
    plot().setData(data);
    figure.dataset.drawn = String(cells.length);
  };
  load();
}
