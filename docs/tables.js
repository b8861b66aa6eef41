// Tables of many rows on the site: a click on a heading sorts them, a field above filters their rows.
const FEW = 12;
const NUMBER = /^[-+±]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?/;

const textOf = (row, column) => row.cells[column]?.textContent.trim() ?? "";

function numberOf(text) {
  const found = text.match(NUMBER);
  return found ? Number(found[0].replace(/[,±]/g, "")) : NaN;
}

// Numbers where all cells that are not empty begin with one; empty cells stay last in both directions.
function sort(body, column, sign) {
  const rows = [...body.rows];
  const filled = rows.filter((row) => textOf(row, column));
  const numeric = filled.every((row) => NUMBER.test(textOf(row, column)));
  const compare = (one, other) =>
    numeric
      ? numberOf(textOf(one, column)) - numberOf(textOf(other, column))
      : textOf(one, column).localeCompare(textOf(other, column), undefined, { numeric: true });
  filled.sort((one, other) => sign * compare(one, other));
  body.append(...filled, ...rows.filter((row) => !textOf(row, column)));
}

function filterOf(rows) {
  const field = Object.assign(document.createElement("input"), { type: "search", className: "table-filter" });
  const count = Object.assign(document.createElement("output"), { value: `${rows.length} rows` });
  field.placeholder = "words that a row has";
  field.setAttribute("aria-label", "filter rows");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    count.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  });
  const line = document.createElement("p");
  line.append(field, " ", count);
  return line;
}

// Names of tests and of files may go on in the next line, so that the words next to them have room.
for (const cell of document.querySelectorAll("article td")) {
  if (!cell.children.length && cell.textContent.includes("::"))
    cell.innerHTML = cell.innerHTML.replace(/::|[/_]/g, "$&<wbr>");
}

for (const table of document.querySelectorAll("article table")) {
  const body = table.tBodies[0];
  if (!table.tHead || !body || body.rows.length <= FEW) continue;
  (table.closest(".md-typeset__scrollwrap") ?? table).before(filterOf([...body.rows]));
  for (const heading of table.tHead.rows[0].cells) {
    const button = Object.assign(document.createElement("button"), { className: "table-sort", title: "sort" });
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.ariaSort === "ascending";
      for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
      heading.ariaSort = down ? "descending" : "ascending";
      sort(body, heading.cellIndex, down ? -1 : 1);
    });
  }
}
