// Where the time of a step goes: one bar, whose parts the table below names.
"use strict";

autopar.drawTime = function () {
  const bar = document.getElementById("breakdown");
  if (!bar) return;
  const { data } = autopar;
  const total = Object.values(data.prediction.breakdown_s).reduce((sum, value) => sum + value, 0);
  const swatches = [...document.querySelectorAll(".swatch[data-part]")];
  bar.className = "bar";
  bar.setAttribute("aria-hidden", "true");
  bar.replaceChildren(
    ...swatches.map((swatch, number) => {
      const value = data.prediction.breakdown_s[swatch.dataset.part];
      const tone = swatch.dataset.part === "bubble" ? autopar.color("--line") : autopar.part(number);
      swatch.style.background = tone;
      const piece = autopar.make("div", { title: `${autopar.words(swatch.dataset.part)}: ${autopar.seconds(value)}` });
      piece.style.background = tone;
      piece.style.flex = String(value / total);
      return piece;
    }),
  );
  bar.hidden = false;
};
