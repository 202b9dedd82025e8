// What the charts share: the data, units, tones, and how a chart is laid out. Nothing is fetched, nothing is kept.
"use strict";

const autopar = (function () {
  const data = JSON.parse(document.getElementById("plan-data").textContent);
  const AXES = Object.keys(data.mesh);
  const NUM_TONES = 6;
  const NUM_PARTS = 9;
  const GIB = 2 ** 30;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const part = (number) => color(`--part-${number % NUM_PARTS}`);
  const words = (name) => name.replace(/_/g, " ");

  function seconds(value) {
    if (value >= 1) return `${value.toPrecision(3)} s`;
    if (value >= 1e-3) return `${(value * 1e3).toPrecision(3)} ms`;
    return `${(value * 1e6).toPrecision(3)} µs`;
  }

  // The unit in which the largest of some bytes is easy to read.
  function unitOf(largest) {
    return largest >= 0.1 * GIB ? [GIB, "GiB"] : [2 ** 20, "MiB"];
  }

  function axisTone(name) {
    const number = AXES.indexOf(name);
    return number < 0 ? "var(--pipeline)" : `var(--axis-${number % NUM_TONES})`;
  }

  // Plotly reads markup in its labels; names are text.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function make(tag, { text, className, ...attributes } = {}) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  function legend(place, entries) {
    place.replaceChildren(
      ...entries.map(([name, tone]) => {
        const entry = make("span");
        const swatch = make("i", { className: "swatch" });
        swatch.style.background = tone;
        entry.append(swatch, name);
        return entry;
      }),
    );
  }

  // How a place of the pipeline is called: by its stage if it has one, with its ranks if there are several.
  function placeName(place) {
    const size = data.num_ranks / data.num_pipeline_ranks;
    const ranks = size > 1 ? `${place * size}–${(place + 1) * size - 1}` : `${place}`;
    if (data.num_pipeline_ranks === 1) return size > 1 ? `any rank` : "rank 0";
    return data.num_stages === data.num_pipeline_ranks ? `stage ${place}` : `ranks ${ranks}`;
  }

  function layout(extra) {
    const axis = () => ({ gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--line") });
    const { xaxis, yaxis, ...rest } = extra;
    return {
      margin: { l: 80, r: 10, t: 10, b: 45 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: color("--soft") },
      hoverlabel: { align: "left" },
      showlegend: false,
      uirevision: "kept",
      xaxis: { ...axis(), ...xaxis },
      yaxis: { ...axis(), ...yaxis },
      ...rest,
    };
  }

  const CONFIG = { responsive: true, displayModeBar: false };

  return { data, AXES, GIB, color, part, words, seconds, unitOf, axisTone, plain, make, legend, placeName, layout, CONFIG };
})();
