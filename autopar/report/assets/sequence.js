// Where the sequence lies: a box a node, a line a rank, along it the positions that the rank holds.
"use strict";

autopar.drawSequence = function () {
  const figure = document.getElementById("sequence-picture");
  if (!figure) return;
  const { data, make } = autopar;
  const { length, nodes } = data.sequence;
  const share = (position) => `${(100 * position) / length}%`;

  figure.querySelector(".lines").replaceChildren(
    ...nodes.map((ranks, number) => {
      const node = make("div", { className: "sequence-node" });
      node.append(make("span", { text: `node ${number}`, className: "faint" }));
      const lines = make("div");
      ranks.forEach(({ rank, spans }, place) => {
        const line = make("div", { className: "line" });
        for (const [start, stop] of spans) {
          const title = `rank ${rank}: tokens ${start.toLocaleString("en")} to ${(stop - 1).toLocaleString("en")}`;
          const piece = make("i", { title });
          piece.style.left = share(start);
          piece.style.width = share(stop - start);
          piece.style.background = autopar.part(place % 8);
          line.append(piece);
        }
        lines.append(line);
      });
      node.append(lines);
      return node;
    }),
  );
  figure.hidden = false;
};
