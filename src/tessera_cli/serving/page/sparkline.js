// A line of the last values, from zero to their maximum, newest at the right.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 32;

export class Sparkline {
  #values = [];
  #length;
  #area = document.createElementNS(SVG, "path");
  #line = document.createElementNS(SVG, "path");

  /** Draw into the `svg` element the last `length` values. */
  constructor(svg, length) {
    this.#length = length;
    svg.setAttribute("viewBox", `0 0 ${length - 1} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    this.#area.setAttribute("class", "area");
    this.#line.setAttribute("class", "line");
    svg.append(this.#area, this.#line);
  }

  push(value) {
    this.#values.push(value);
    if (this.#values.length > this.#length) this.#values.shift();
    const highest = Math.max(...this.#values) || 1;
    const left = this.#length - this.#values.length;
    const points = this.#values.map(
      (one, index) => `${left + index},${(HEIGHT - 2 - (one / highest) * (HEIGHT - 4)).toFixed(2)}`,
    );
    this.#line.setAttribute("d", `M${points.join("L")}`);
    this.#area.setAttribute("d", `M${left},${HEIGHT}L${points.join("L")}L${this.#length - 1},${HEIGHT}Z`);
  }

  clear() {
    this.#values = [];
    this.#line.removeAttribute("d");
    this.#area.removeAttribute("d");
  }
}
