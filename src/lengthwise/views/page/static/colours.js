"use strict";
// The colours of the figures and their rules (style.py): one map from end to end, two-sided about 0 where both sides
// count, white where all is 0, and for weights their logarithm.

const PALETTES = {};

function openPalettes(texts) {
  for (const [name, text] of Object.entries(texts)) PALETTES[name] = bytesOf(text);
}

/** The range and the map for numbers between a least and a greatest; `log` for weights. */
function scaleOf(low, high, log = false) {
  const hasNumbers = low <= high;
  if (!hasNumbers) [low, high] = [0, 0];
  if (log && high > 0) {
    return { low: Math.min(Math.max(low, high / 10000), high / 10), high, palette: "one", log: true };
  }
  if (low < 0 && high > 0 && Math.min(-low, high) >= (high - low) / 10) {
    const end = Math.max(-low, high);
    return { low: -end, high: end, palette: "two" };
  }
  if (low === 0 && high === 0) return { low: -1, high: 1, palette: "two", allZero: hasNumbers };
  if (low === high) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  return { low, high, palette: "one" };
}

/** Where a number lies in its range, from 0 to 1. */
function shareOf({ low, high, log }, value) {
  if (!log) return (value - low) / (high - low);
  return value > low ? Math.log(value / low) / Math.log(high / low) : 0;
}

/** The number at a place in a range, from 0 to 1. */
function valueAt({ low, high, log }, share) {
  return log ? low * (high / low) ** share : low + share * (high - low);
}

function colourOf(scale, value) {
  return 3 * Math.min(255, Math.max(0, Math.floor(shareOf(scale, value) * 256)));
}

// Where white is a colour of the map, what is masked is grey, as in the figures: 0.88 on white.
const MASKED = [128, 128, 128, 62];

/** Paint columns x rows numbers into a canvas of that size; what is masked is left empty, or grey. */
function paint(canvas, columns, rows, scale, value) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const palette = PALETTES[scale.palette];
  let place = 0;
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < columns; x++, place += 4) {
      const number = value(y, x);
      if (Number.isNaN(number)) {
        if (scale.palette === "two") image.data.set(MASKED, place);
        continue;
      }
      const colour = colourOf(scale, number);
      image.data[place] = palette[colour];
      image.data[place + 1] = palette[colour + 1];
      image.data[place + 2] = palette[colour + 2];
      image.data[place + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}

function css(scale, value) {
  const colour = colourOf(scale, value);
  const palette = PALETTES[scale.palette];
  return `rgb(${palette[colour]} ${palette[colour + 1]} ${palette[colour + 2]})`;
}
