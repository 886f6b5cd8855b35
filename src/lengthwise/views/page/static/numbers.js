"use strict";
// Arrays as payload.py packs them: base64, deflated, bytes of equal weight side by side, perhaps second differences.

const unpacked = new WeakMap();

/** The numbers of a packed array, unpacked once. */
function numbers(packed) {
  if (!unpacked.has(packed)) unpacked.set(packed, unpack(packed));
  return unpacked.get(packed);
}

function bytesOf(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

async function unpack(packed) {
  const stream = new Blob([bytesOf(packed.text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = packed.bytes;
  const count = planes.length / size;
  const bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < size; plane++) {
    const start = plane * count;
    for (let i = 0; i < count; i++) bytes[i * size + plane] = planes[start + i];
  }
  if (packed.smooth) undoDifferences(new Int32Array(bytes.buffer), packed.shape[packed.shape.length - 1]);
  return size === 8 ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
}

/** Second differences back to the bit patterns of float32, row by row, in place. */
function undoDifferences(words, length) {
  for (let row = 0; row < words.length; row += length) {
    let step = 0;
    let whole = 0;
    for (let i = row; i < row + length; i++) {
      step = (step + ((words[i] >>> 1) ^ -(words[i] & 1))) | 0;
      whole = (whole + step) | 0;
      words[i] = whole < 0 ? -whole | 0x80000000 : whole;
    }
  }
}

/** A number in four digits with a real minus sign; a dash where there is none. */
function formatNumber(value, digits = 4) {
  if (value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const far = size !== 0 && (size < 1e-4 || size >= 1e6);
  const text = far ? value.toExponential(digits - 2) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}
