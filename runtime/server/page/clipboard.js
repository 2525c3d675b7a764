// Copying, also where a page without HTTPS has no clipboard of its own.

async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("the browser does not let this page copy");
}

/** Copies and says so on the button for a moment. */
export async function copyFrom(button, text) {
  const name = button.textContent;
  let told = "Copied";
  try {
    await copy(text);
  } catch {
    told = "Not copied";
  }
  button.textContent = told;
  setTimeout(() => (button.textContent = name), 1500);
}
