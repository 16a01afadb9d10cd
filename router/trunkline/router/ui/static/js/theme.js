/** @file Dark or light: as the system says, until somebody chooses. */

const STORED = "trunkline.theme";
const DARK = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;

/** Events "change": the colours are others now; what draws on a canvas draws again. */
export const theme = new EventTarget();

/** @param {"dark" | "light"} name */
function show(name) {
  if (root.dataset.theme === name) return;
  root.dataset.theme = name;
  theme.dispatchEvent(new Event("change"));
}

/** The other theme, from now on in this browser; back to the system's if that is what the system says. */
export function toggleTheme() {
  const next = root.dataset.theme === "dark" ? "light" : "dark";
  if ((next === "dark") === DARK.matches) localStorage.removeItem(STORED);
  else localStorage.setItem(STORED, next);
  show(next);
}

DARK.addEventListener("change", () => {
  if (!localStorage.getItem(STORED)) show(DARK.matches ? "dark" : "light");
});

/** @param {string} name of a custom property, as "--device" @returns {string} its value now */
export function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}
