"use strict";
// Helpers that every part draws with.

const find = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text and never markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Round numbers from a start up to a stop, at most about six of them. */
function ticks(start, stop, most = 6) {
  const power = 10 ** Math.floor(Math.log10((stop - start) / most || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => (stop - start) / size <= most) || 10 * power;
  const places = [];
  for (let n = Math.ceil(start / step); n * step <= stop + step * 1e-9; n++) {
    places.push(Number((n * step).toPrecision(12)));
  }
  return places;
}

/** Powers of ten of a logarithmic range, and between them 2 and 5 where there are few. */
function logTicks(low, high) {
  const factors = high / low < 100 ? [1, 2, 5] : [1];
  const powers = Array.from({ length: 12 }, (_, n) => 10 ** (Math.floor(Math.log10(low)) + n));
  return powers.flatMap((power) => factors.map((factor) => Number((factor * power).toPrecision(12))))
    .filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
}

/** A token as it is read: the letters that stand for a space or a line's end are shown as those. */
function readable(token) {
  return token.replace(/[Ġ▁]/g, " ").replace(/[Ċ\n]/g, "↵").replace(/ĉ|\t/g, "⇥");
}

/** Run something at most once a frame. */
function onFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}
