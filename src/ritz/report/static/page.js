// The page around the charts: theme, contents, filter, copying. Runs once, when the document is there.
"use strict";

// ---------------------------------------------------------------------------------------------------- theme
// "auto" follows the system; the choice is kept where the browser allows it (a file may have no storage).
function remembered() {
  try {
    return localStorage.getItem("ritz-theme");
  } catch {
    return null;
  }
}

function setTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

setTheme(remembered());

function themeButton() {
  const button = document.getElementById("ritz-theme");
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const name = () => button.setAttribute("aria-label", dark() ? "Switch to light" : "Switch to dark");
  button.addEventListener("click", () => {
    const next = dark() ? "light" : "dark";
    setTheme(next);
    name();
    try {
      localStorage.setItem("ritz-theme", next);
    } catch {
      // kept for this view only
    }
  });
  name();
}

// ---------------------------------------------------------------------------------------------------- contents
function contents() {
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const [id, link] of links) {
          if (id === entry.target.id) link.setAttribute("aria-current", "true");
          else link.removeAttribute("aria-current");
        }
      }
    },
    { rootMargin: "-10% 0px -70% 0px" },
  );
  for (const section of document.querySelectorAll("main section")) seen.observe(section);
}

// ---------------------------------------------------------------------------------------------------- tables
function filters() {
  for (const input of document.querySelectorAll("input[data-filter]")) {
    const table = document.getElementById(input.dataset.filter);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/);
      for (const body of table.tBodies) {
        let left = 0;
        for (const row of body.querySelectorAll("tr[data-row]")) {
          row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
          left += !row.hidden;
        }
        body.hidden = left === 0;
      }
    });
  }
}

function copying() {
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(source); // the browser says no: it is marked, ready to be copied
        button.textContent = "selected";
      }
    });
  }
}

// ---------------------------------------------------------------------------------------------------- start
document.addEventListener("DOMContentLoaded", () => {
  themeButton();
  contents();
  filters();
  copying();
  const specs = JSON.parse(document.getElementById("ritz-charts").textContent);
  const charts = specs.map((spec) => new Chart(document.getElementById(spec.id), spec));
  const onPaper = (chart) => (chart.figure.closest(".charts") ? 340 : 680);
  const drawn = (tallest, width) => {
    for (const chart of charts) {
      chart.tallest = tallest;
      chart.draw(width?.(chart));
    }
  };
  addEventListener("beforeprint", () => drawn(270, onPaper));
  addEventListener("afterprint", () => drawn());
  document.documentElement.dataset.ready = charts.length;
});
