// The colours of tiles: a hue for each sequence, the rest from the style sheet, light or dark.

const FIRST_HUE = 185; // degrees, that of the legend
const GOLDEN_ANGLE = 137.508; // successive hues are far apart, however many there are

let scheme = null;

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (scheme = null));

function read() {
  if (scheme === null) {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    scheme = {
      free: of("--tile-free"),
      mark: of("--tile-mark"),
      cursor: of("--focus"),
      held: of("--tile-held"),
      cached: of("--tile-cached"),
    };
  }
  return scheme;
}

function hueOf(owner) {
  return (FIRST_HUE + owner * GOLDEN_ANGLE) % 360;
}

/** The colour of what the sequence numbered `owner` holds. */
export function held(owner) {
  return `oklch(${read().held} ${hueOf(owner)})`;
}

/** The pale colour of what `owner` has left in the cache; 0 if nobody knows who. */
export function cached(owner) {
  return `oklch(${read().cached} ${hueOf(owner)})`;
}

export const free = () => read().free;
export const mark = () => read().mark;
export const cursor = () => read().cursor;
