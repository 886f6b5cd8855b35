"use strict";
// Small things that every part draws with.

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

/** Round numbers from a start below a stop, some six of them. */
function ticks(start, stop, most = 6) {
  const power = 10 ** Math.floor(Math.log10((stop - start) / most || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => (stop - start) / one <= most) || 10 * power;
  const found = [];
  for (let n = Math.ceil(start / step); n * step <= stop + step * 1e-9; n++) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
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
