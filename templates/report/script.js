"use strict";

function selectAll(element) {
  const range = document.createRange();
  range.selectNodeContents(element);
  const selection = window.getSelection();
  selection.removeAllRanges();
  selection.addRange(range);
}

async function copyText(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return "Copied";
  } catch {
    selectAll(element);
    return document.execCommand("copy") ? "Copied" : "Selected, now press Ctrl+C";
  }
}

for (const button of document.querySelectorAll("button[data-copy]")) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    button.textContent = await copyText(document.getElementById(button.dataset.copy));
    setTimeout(() => { button.textContent = label; }, 2500);
  });
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
});

function keyOf(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.value ?? cell.textContent;
  const number = text === "" ? -Infinity : Number(text);
  return Number.isNaN(number) ? text : number;
}

function compare(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === "number" ? -1 : 1;
}

for (const button of document.querySelectorAll("table.sortable th button")) {
  const header = button.closest("th");
  const body = button.closest("table").tBodies[0];
  button.addEventListener("click", () => {
    const isDescending = header.getAttribute("aria-sort") === "ascending";
    for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
    const sign = isDescending ? -1 : 1;
    const column = header.cellIndex;
    const rows = Array.from(body.rows).sort((a, b) => sign * compare(keyOf(a, column), keyOf(b, column)));
    body.append(...rows);
  });
}

let closed = [];
addEventListener("beforeprint", () => {
  closed = Array.from(document.querySelectorAll("details:not([open])"));
  for (const part of closed) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of closed) part.open = false;
});
