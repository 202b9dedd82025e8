// The picture of the cluster: a box a node, a cell a rank, coloured by its place on one axis.
"use strict";

autopar.repaintCluster = () => {};

autopar.drawCluster = function () {
  const figure = document.getElementById("picture");
  if (!figure) return;
  const { data, make } = autopar;
  const { axes, nodes } = data.picture;
  const shown = axes.filter((name) => name === "pp" || data.mesh[name] > 1);
  const cells = [];

  const box = figure.querySelector(".nodes");
  for (const ranks of nodes) {
    const node = make("div", { className: "node" });
    node.style.gridTemplateColumns = `repeat(${Math.min(ranks.length, 4)}, 1fr)`;
    for (const { rank, places } of ranks) {
      const title = `rank ${rank}: ${axes.map((name, n) => `${name} ${places[n]}`).join(", ")}`;
      const cell = make("div", { className: "rank", title });
      cells.push([cell, places]);
      node.append(cell);
    }
    box.append(node);
  }

  // Neighbours on an axis differ in tone; the number says which place it is.
  function paint(name) {
    const index = axes.indexOf(name);
    for (const [cell, places] of cells) {
      const tone = autopar.part(places[index] % 8);
      cell.textContent = String(places[index]);
      cell.style.background = `color-mix(in srgb, ${tone} 30%, ${autopar.color("--card")})`;
      cell.style.borderLeft = `4px solid ${tone}`;
    }
  }

  const group = document.getElementById("picture-axes");
  shown.forEach((name, number) => {
    const label = make("label");
    const radio = make("input", { type: "radio", name: "picture-axis", value: name });
    radio.checked = number === 0;
    radio.addEventListener("change", () => paint(name));
    label.append(radio, ` ${name}`);
    group.append(label);
  });
  autopar.repaintCluster = () => paint(group.querySelector("input:checked").value);
  if (shown.length) {
    autopar.repaintCluster();
    figure.hidden = false;
  }
};

// Everything on one mesh axis has one colour.
autopar.paintChips = function () {
  for (const chip of document.querySelectorAll(".chip[data-axis]")) {
    chip.style.setProperty("--tone", autopar.axisTone(chip.dataset.axis));
  }
};
