(function () {
  "use strict";
  const root = document.documentElement;
  const all = (selector, from) => Array.from((from || document).querySelectorAll(selector));
  const one = (selector) => document.querySelector(selector);

  // Light and dark: the system's choice until the reader makes one, which is kept where the browser allows it.
  const memory = {
    get() { try { return localStorage.getItem("assay-theme"); } catch { return null; } },
    set(value) { try { localStorage.setItem("assay-theme", value); } catch { /* a page opened from a file may have no storage */ } },
  };
  const theme = one("#theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const paint = () => { theme.textContent = isDark() ? "Light" : "Dark"; theme.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours"); };
  if (["light", "dark"].includes(memory.get())) root.dataset.theme = memory.get();
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; memory.set(root.dataset.theme); paint(); });
  system.addEventListener("change", paint);
  paint();

  // Commands can be copied.
  for (const button of all(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
  }

  const claims = all(".claim");
  if (!claims.length) return;

  // Search and filters: a claim is shown where all words are in it or in its method, its verdict is chosen and its
  // method is of the field.
  const q = one("#q"), field = one("#field"), count = one("#count"), nothing = one("#nothing"), tiles = all(".tile");
  const methods = all(".method").map((node) => ({
    node,
    text: node.dataset.text,
    fields: JSON.parse(node.dataset.fields),
    link: one(`.contents li[data-for="${CSS.escape(node.id)}"]`),
    claims: all(".claim", node),
  }));
  function filter() {
    const words = q.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = tiles.filter((t) => t.getAttribute("aria-pressed") === "true").map((t) => t.dataset.verdict);
    let shown = 0;
    for (const method of methods) {
      let any = 0;
      const inField = !field.value || method.fields.includes(field.value);
      for (const claim of method.claims) {
        const fits = inField
          && (!chosen.length || chosen.includes(claim.dataset.verdict))
          && words.every((w) => claim.dataset.text.includes(w) || method.text.includes(w));
        claim.hidden = !fits;
        any += fits;
      }
      method.node.hidden = method.link.hidden = !any && (method.claims.length || words.length || chosen.length || !inField);
      shown += any;
    }
    const total = claims.length;
    count.textContent = shown === total ? `${total} claim${total === 1 ? "" : "s"}` : `${shown} of ${total}`;
    nothing.hidden = shown > 0;
  }
  function clear() { q.value = ""; field.value = ""; tiles.forEach((t) => t.setAttribute("aria-pressed", "false")); filter(); }
  q.addEventListener("input", filter);
  field.addEventListener("change", filter);
  for (const tile of tiles) {
    tile.addEventListener("click", () => { tile.setAttribute("aria-pressed", String(tile.getAttribute("aria-pressed") !== "true")); filter(); });
  }
  one("#clear").addEventListener("click", () => { clear(); q.focus(); });
  one("#filters").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) { event.preventDefault(); q.focus(); q.select(); }
    if (event.key === "Escape" && document.activeElement === q) { clear(); }
  });

  const openall = one("#openall");
  openall.addEventListener("click", () => {
    const open = openall.getAttribute("aria-pressed") !== "true";
    openall.setAttribute("aria-pressed", String(open));
    openall.textContent = open ? "Close all" : "Open all";
    claims.forEach((c) => { c.open = open; });
  });

  // A link to a claim opens it.
  function reveal() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.hidden) clear();
    if (target && target.matches("details")) target.open = true;
    if (target) target.scrollIntoView();
  }
  addEventListener("hashchange", reveal);
  if (location.hash) reveal();

  // On paper everything is open.
  let closed = [];
  addEventListener("beforeprint", () => { closed = all("details:not([open])"); closed.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => { closed.forEach((d) => { d.open = false; }); closed = []; });

  // On a phone the list of methods starts folded.
  if (matchMedia("(max-width: 60rem)").matches) one(".contents details").open = false;
  filter();
})();
