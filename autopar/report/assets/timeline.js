// A step over time. A few thousand passes are bars; more are a picture of as many columns as the screen has, drawn
// again for the part that is looked at, until that has few enough to be bars.
"use strict";

autopar.redrawTimeline = () => {};

autopar.drawTimeline = function (streams) {
  const section = document.getElementById("step-section");
  if (!section || !streams) return;
  const { data, seconds } = autopar;
  const MOST_BARS = 3000;
  const MOST_LABELS = 400;
  const COLUMNS = 1400;
  const KINDS = [
    ["F", "forward", 0], ["B", "backward", 1], ["I", "backward, inputs", 5], ["W", "backward, weights", 2],
    ["O", "optimiser", 7], ["G", "parameters gathered", 4], ["R", "gradients summed", 3], ["S", "sent", 8],
  ];
  const CODE = Object.fromEntries(KINDS.map(([letter], number) => [letter, number]));
  const tick = streams.step_time_s / 1e6;
  const ranks = streams.ranks.map(({ lanes, kinds, labels, starts, ends }) =>
    labels.map((label, n) => ({
      lane: Number(lanes[n]),
      kind: CODE[kinds[n]],
      label,
      start: starts[n] * tick,
      end: ends[n] * tick,
    })),
  );
  const lanes = ranks.some((bars) => bars.some((bar) => bar.lane)) ? 2 : 1;
  const used = new Set(ranks.flat().map((bar) => bar.kind));
  const whole = { x: [0, streams.step_time_s], y: [ranks.length - 0.4, -0.6] };
  let view = whole;

  const say = (rank, bar) =>
    `${autopar.placeName(rank)}<br>${KINDS[bar.kind][1]}: ${autopar.plain(bar.label)}<br>${seconds(bar.start)} to ${seconds(bar.end)}`;
  const tone = (kind) => autopar.part(KINDS[kind][2]);

  function visible() {
    const [top, bottom] = [Math.min(...view.y), Math.max(...view.y)];
    const found = [];
    ranks.forEach((bars, rank) => {
      if (rank + 0.5 < top || rank - 0.5 > bottom) return;
      for (const bar of bars) if (bar.end > view.x[0] && bar.start < view.x[1]) found.push([rank, bar]);
    });
    return found;
  }

  function bars(found) {
    const labelled = found.length <= MOST_LABELS;
    const traces = new Map();
    for (const [rank, bar] of found) {
      const key = `${bar.lane} ${bar.kind}`;
      if (!traces.has(key)) {
        traces.set(key, {
          type: "bar", orientation: "h", x: [], base: [], y: [], text: [], customdata: [],
          offset: bar.lane ? 0.26 : -0.42, width: bar.lane ? 0.14 : 0.64,
          textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none",
          insidetextfont: { size: 10, color: bar.kind === CODE.F ? "#ffffff" : "#111827" },
          marker: { color: tone(bar.kind), line: { width: labelled ? 0.5 : 0, color: autopar.color("--card") } },
          hovertemplate: "%{customdata}<extra></extra>",
        });
      }
      const trace = traces.get(key);
      trace.x.push(bar.end - bar.start);
      trace.base.push(bar.start);
      trace.y.push(rank);
      // The microbatch, where there is room for it.
      const number = /^\d+[FBIW](\d+)$/.exec(bar.label);
      const wide = (bar.end - bar.start) / (view.x[1] - view.x[0]) > 0.018;
      trace.text.push(labelled && wide && number ? number[1] : "");
      trace.customdata.push(say(rank, bar));
    }
    return [...traces.values()];
  }

  function picture() {
    const [from, to] = view.x;
    const step = (to - from) / COLUMNS;
    const edges = [];
    const z = [];
    const text = [];
    ranks.forEach((bars, rank) => {
      for (let lane = 0; lane < lanes; lane += 1) {
        const own = bars.filter((bar) => bar.lane === lane);
        const colours = new Array(COLUMNS).fill(null);
        const words = new Array(COLUMNS).fill("");
        for (const bar of own) {
          const first = Math.max(0, Math.ceil((bar.start - from) / step - 0.5));
          const last = Math.min(COLUMNS - 1, Math.ceil((bar.end - from) / step - 0.5) - 1);
          if (first > last) continue;
          const said = say(rank, bar);
          for (let column = first; column <= last; column += 1) {
            colours[column] = bar.kind;
            words[column] = said;
          }
        }
        edges.push(rank + (lane ? 0.24 : -0.44));
        z.push(colours);
        text.push(words);
      }
      edges.push(rank + 0.42);
      z.push(new Array(COLUMNS).fill(null));
      text.push(new Array(COLUMNS).fill(""));
    });
    edges.push(ranks.length - 0.44);
    const scale = KINDS.flatMap((_, n) => [[n / KINDS.length, tone(n)], [(n + 1) / KINDS.length, tone(n)]]);
    return [{
      type: "heatmap", x0: from + step / 2, dx: step, y: edges, z, text, zmin: -0.5, zmax: KINDS.length - 0.5,
      colorscale: scale, showscale: false, hoverongaps: false, hovertemplate: "%{text}<extra></extra>", zsmooth: false,
    }];
  }

  const place = document.getElementById("timeline");
  const rowHeight = ranks.length <= 16 ? 34 : ranks.length <= 64 ? 12 : 4;
  const skip = Math.max(1, Math.ceil(ranks.length / 24));

  function draw() {
    const kinds = KINDS.map(([, name], kind) => [name, tone(kind), kind]);
    autopar.legend(document.getElementById("timeline-legend"), kinds.filter(([, , kind]) => used.has(kind)));
    const found = visible();
    const many = found.length > MOST_BARS;
    const named = ranks.map((_, rank) => rank).filter((rank) => rank % skip === 0);
    return Plotly.react(
      place,
      many ? picture() : bars(found),
      autopar.layout({
        barmode: "overlay",
        height: 80 + Math.min(640, Math.max(60, ranks.length * rowHeight)),
        dragmode: "zoom",
        xaxis: { title: { text: "seconds" }, range: [...view.x], zeroline: false },
        yaxis: {
          range: [...view.y], tickvals: named, ticktext: named.map(autopar.placeName), zeroline: false, showgrid: false,
          fixedrange: ranks.length < 9, automargin: true,
        },
      }),
      autopar.CONFIG,
    );
  }

  function look(next) {
    view = next;
    draw();
  }

  const width = () => view.x[1] - view.x[0];
  const MOVES = {
    in: () => ({ ...view, x: [view.x[0] + width() / 4, view.x[1] - width() / 4] }),
    out: () => ({ ...view, x: [Math.max(0, view.x[0] - width() / 2), Math.min(whole.x[1], view.x[1] + width() / 2)] }),
    left: () => ({ ...view, x: view.x.map((value) => value - Math.min(width() / 2, view.x[0])) }),
    right: () => ({ ...view, x: view.x.map((value) => value + Math.min(width() / 2, whole.x[1] - view.x[1])) }),
    all: () => whole,
  };
  for (const button of section.querySelectorAll("button[data-move]")) {
    button.addEventListener("click", () => look(MOVES[button.dataset.move]()));
  }

  document.getElementById("step-words").textContent =
    `Simulated, ${seconds(streams.step_time_s)}, ${(100 * streams.bubble_fraction).toFixed(1)} % of the passes' time ` +
    "waiting for other stages (empty). Drag to zoom, double-click to see all of it." +
    (data.num_pipeline_ranks > 1 ? " Each row stands for all ranks of its place in the pipeline." : "");
  section.hidden = false;
  autopar.redrawTimeline = draw;
  draw().then(() => {
    place.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change || "yaxis.range[0]" in change) {
        look({
          x: "xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : view.x,
          y: "yaxis.range[0]" in change ? [change["yaxis.range[0]"], change["yaxis.range[1]"]] : view.y,
        });
      } else if ("xaxis.autorange" in change || "yaxis.autorange" in change) look(whole);
    });
  });
};
