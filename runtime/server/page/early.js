// Before anything is drawn, so that a page in dark never flashes in light. No module: those run later.
try {
  const theme = JSON.parse(localStorage.getItem("llmc.theme"));
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // The system's choice, then.
}
