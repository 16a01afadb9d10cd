// Before the first paint: a page that is dark must not flash.
(() => {
  "use strict";
  const chosen = localStorage.getItem("trunkline.theme");
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
