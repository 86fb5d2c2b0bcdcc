// Draws the figures with sliders (docs/figures/*.html). Every number that they show comes from the table in the page, which
// the operators themselves have computed; this script looks it up and places points and arrows.
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  const add = (svg, kind, attributes, words) => {
    const element = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) { element.setAttribute(name, value); }
    if (words !== undefined) { element.textContent = words; }
    svg.append(element);
  };

  const show = (output, rows) => {
    output.replaceChildren(...rows.map(([words, value]) => {
      const row = document.createElement("span");
      row.append(`${words} `, Object.assign(document.createElement("b"), { textContent: value }));
      return row;
    }));
  };

  const fixed = (value) => value.toFixed(3);

  const draw = {
    cka(svg, output, data, at) {
      const turn = data.turns[at.turn] * Math.PI / 180;
      const scale = data.scales[at.scale];
      const share = data.shares[at.share];
      const unit = 38;
      [[85, "A"], [255, "B"]].forEach(([x, name]) => {
        add(svg, "rect", { x: x - 80, y: 22, width: 160, height: 160, rx: 4, class: "box" });
        add(svg, "text", { x, y: 14, "text-anchor": "middle", class: "strong" }, `representation ${name}`);
      });
      data.x.forEach((point, index) => {
        const mixed = [0, 1].map((axis) => (1 - share) * point[axis] + share * data.other[index][axis]);
        const turned = [
          scale * (Math.cos(turn) * mixed[0] - Math.sin(turn) * mixed[1]),
          scale * (Math.sin(turn) * mixed[0] + Math.cos(turn) * mixed[1]),
        ];
        [[85, point], [255, turned]].forEach(([x, place], side) => {
          const [cx, cy] = [x + unit * place[0], 102 - unit * place[1]];
          add(svg, "circle", { cx, cy, r: 7.5, class: `point side${side}` });
          add(svg, "text", { x: cx, y: cy + 3.5, "text-anchor": "middle", class: "label" }, index + 1);
        });
      });
      const index = (at.turn * data.scales.length + at.scale) * data.shares.length + at.share;
      show(output, [
        ["linear CKA, centered", fixed(data.cka[index])],
        ["mean distance of a point from its twin", fixed(data.distance[index])],
      ]);
    },

    fur(svg, output, data, at) {
      const radius = 110;
      add(svg, "circle", { cx: 170, cy: 125, r: radius, class: "box" });
      add(svg, "ellipse", { cx: 170, cy: 125, rx: radius, ry: radius / 4, class: "line" });
      data.positions[at.step].forEach(([x, y, z]) => {
        const place = { cx: 170 + radius * x, cy: 125 - radius * y, r: 4.5 };
        add(svg, "circle", { ...place, class: z < 0 ? "point far" : "point side0" });
      });
      show(output, [
        ["term per point", fixed(data.value[at.step])],
        ["share of the mass that is moved", fixed(data.mass[at.step])],
        ["length of the mean", fixed(data.resultant[at.step])],
      ]);
    },

    eua(svg, output, data, at) {
      const unit = 74;
      const clients = [data.first, [data.angles[at.angle], data.lengths[at.length]]].map(([degrees, length]) => {
        const angle = degrees * Math.PI / 180;
        return [length * Math.cos(angle), length * Math.sin(angle)];
      });
      const index = (at.angle * data.lengths.length + at.length) * 2 + at.divisor;
      const [p, shares] = [data.p[index], data.shares[index]];
      const sum = (weights) => [0, 1].map((axis) => clients.reduce((s, c, k) => s + weights[k] * c[axis], 0));
      const arrow = ([x, y], kind, name) => {
        const [tipX, tipY] = [170 + unit * x, 125 - unit * y];
        const [length, angle] = [Math.hypot(x, y), Math.atan2(-y, x)];
        add(svg, "line", { x1: 170, y1: 125, x2: tipX, y2: tipY, class: `arrow ${kind}` });
        if (length * unit > 4) {
          const corner = (turn, size) => `${tipX - size * Math.cos(angle + turn)} ${tipY - size * Math.sin(angle + turn)}`;
          add(svg, "path", { d: `M ${tipX} ${tipY} L ${corner(0.4, 9)} L ${corner(-0.4, 9)} z`, class: `head ${kind}` });
        }
        if (name) {
          const place = { x: tipX + 12 * Math.cos(angle), y: tipY + 12 * Math.sin(angle) + 4 };
          add(svg, "text", { ...place, "text-anchor": "middle", class: "strong" }, name);
        }
      };
      clients.forEach((client, k) => arrow(client, `client${k}`, `${k + 1}`));
      arrow(sum([0.5, 0.5]), "mean");
      arrow(sum(shares), "step");
      add(svg, "line", { x1: 8, y1: 12, x2: 34, y2: 12, class: "arrow step" });
      add(svg, "text", { x: 40, y: 16, class: "small" }, "EUA's step");
      add(svg, "line", { x1: 8, y1: 30, x2: 34, y2: 30, class: "arrow mean" });
      add(svg, "text", { x: 40, y: 34, class: "small" }, "plain mean");
      show(output, clients.map((_, k) => [`client ${k + 1}:`, `p ${fixed(p[k])}, share ${fixed(shares[k])}`]));
    },
  };

  const start = () => {
    document.querySelectorAll("figure[data-figure]").forEach((figure) => {
      const data = JSON.parse(figure.querySelector("script").textContent);
      const [svg, output] = [figure.querySelector("svg"), figure.querySelector("output")];
      const sliders = [...figure.querySelectorAll("input")];
      const redraw = () => {
        const at = {};
        sliders.forEach((slider) => {
          const words = JSON.parse(slider.dataset.values)[slider.value];
          at[slider.dataset.key] = Number(slider.value);
          slider.nextElementSibling.textContent = words;
          slider.setAttribute("aria-valuetext", words);
        });
        svg.replaceChildren();
        draw[figure.dataset.figure](svg, output, data, at);
      };
      sliders.forEach((slider) => slider.addEventListener("input", redraw));
      redraw();
    });
  };

  if (document.readyState === "loading") { document.addEventListener("DOMContentLoaded", start); } else { start(); }
})();
