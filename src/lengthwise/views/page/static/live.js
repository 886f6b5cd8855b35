"use strict";
// The page over live models: it asks its own server for maps, and for single cells where the cursor rests.

const ROWS = 256;

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer. Is `lengthwise serve` still running?");
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw new Error(error || `The server answers ${answer.status}.`);
}

async function fillChoices() {
  const { groups, tables, limit } = await (await ask("api/choices")).json();
  for (const id of ["first", "second"]) {
    const kept = find(id).value;
    const nothing = id === "second" ? [make("option", { value: "" }, "nothing")] : [];
    const options = groups.filter((group) => group.names.length).map((group) =>
      make("optgroup", { label: group.label }, ...group.names.map((name) => make("option", { value: name }, name))));
    find(id).replaceChildren(...nothing, ...options);
    if ([...find(id).options].some((option) => option.value === kept)) find(id).value = kept;
  }
  find("length").max = limit;
  find("tables").replaceChildren(find("tables").firstElementChild, ...tables.map(tableOf));
  find("tables").hidden = !tables.length;
}

function tableOf({ title, head, rows }) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, String(cell))));
  const body = make("tbody", {}, ...rows.map((row) => line(row, "td")));
  const table = make("table", {}, make("thead", {}, line(head, "th")), body);
  return make("div", { className: "scroll" }, make("h3", {}, title), table);
}

async function lookAt() {
  fault("");
  find("look").disabled = true;
  find("look").textContent = "Looking…";
  try {
    const own = find("reads").value === "text";
    const models = [];
    for (const model of [find("first").value, find("second").value].filter(Boolean)) {
      const reads = own ? { text: find("words").value } : { length: Number(find("length").value) };
      const wanted = { model, layer: find("layers").value, ...reads };
      const headers = { "Content-Type": "application/json" };
      const answer = await ask("api/look", { method: "POST", headers, body: JSON.stringify(wanted) });
      models.push(await answer.json());
    }
    await start(models, models.map((model) => `${model.encoding} (${model.name})`).join(" and "));
  } catch (error) {
    fault(error.message);
    fillChoices().catch(() => {});
  } finally {
    find("look").disabled = false;
    find("look").textContent = "Look";
  }
}

/** Ask for every cell of the query's row, and of what is seen once that is small; draw again if there was any. */
async function sharpen() {
  let learned = false;
  for (const side of state.sides) {
    const { look } = snapshotOf(side);
    if (!look || !side.reads) continue;
    for (const [what, layer] of Object.entries(side.reads)) {
      const { i, j } = cursorOf(layer);
      const { head } = state;
      const rows = layer.matrix.single(head, i, j) ? [] : [{ i, j: 0, rows: 1, columns: layer.keys }];
      const seen = windowOf(layer);
      const near = what === state.what && seen.rows <= ROWS && seen.columns <= ROWS;
      const ends = [[seen.i, seen.j], [seen.i + seen.rows - 1, seen.j + seen.columns - 1]];
      if (near && !ends.every(([y, x]) => layer.matrix.single(head, y, x))) rows.push(seen);
      for (const part of rows) {
        const query = new URLSearchParams({ look, what, layer: layer.layer, head, ...part });
        const answer = await ask(`api/cells?${query}`);
        layer.matrix.learn(head, { ...part, cells: new Float32Array(await answer.arrayBuffer()) });
        learned = true;
      }
    }
  }
  if (learned) redrawMaps(), redrawCursor();
}

let resting = 0;
state.settled = () => {
  clearTimeout(resting);
  resting = setTimeout(() => sharpen().catch((error) => fault(error.message)), 120);
};

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  lookAt();
});
find("reads").addEventListener("change", () => {
  const own = find("reads").value === "text";
  find("words-field").hidden = !own;
  find("length-field").hidden = own;
});
fillChoices().catch((error) => fault(error.message));
