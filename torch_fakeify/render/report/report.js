"use strict";
// Search, keys and stacks of a report. Texts go into the page as text alone, never as markup.
(() => {
  const start = (frame) => {
    const prefix = frame.dataset.prefix; // of the ids of a frame, where a page has several
    const $ = (id) => document.getElementById(prefix + id);
    const main = $("graph");
    const query = $("query");
    const status = $("hits");
    const { frames, stacks } = JSON.parse($("stacks").textContent);
    for (const el of main.querySelectorAll(".tools, .keys")) el.hidden = false;

    // --- stacks, written when they are asked for ---

    const element = (name, text, cls) => {
      const made = document.createElement(name);
      made.textContent = text;
      if (cls) made.className = cls;
      return made;
    };

    frame.addEventListener("toggle", (event) => {
      const place = event.target;
      if (!place.open || !place.dataset.stack || place.querySelector(".stack")) return;
      const list = element("ol", "", "stack");
      for (const at of stacks[place.dataset.stack]) {
        const [file, line, name, code] = frames[at];
        const entry = element("li", `${file}:${line} in ${name}`);
        if (code) entry.append(element("code", code, "line"));
        list.append(entry);
      }
      place.querySelector("summary").after(list);
    }, true);

    // --- what is where ---

    const folded = (el) => {
      const inside = el.tagName === "SUMMARY" ? el.parentElement.parentElement : el;
      return inside.closest("details:not([open])") !== null;
    };

    let revealed = null;
    const reveal = (el) => {
      const inside = el.tagName === "SUMMARY" ? el.parentElement.parentElement : el;
      for (let up = inside.closest("details"); up; up = up.parentElement.closest("details")) up.open = true;
      revealed = el;
      const block = el.offsetHeight > innerHeight / 2 ? "start" : "center";
      el.scrollIntoView({ block });
      // What comes into sight is laid out in the next frame, and may be of another height.
      requestAnimationFrame(() => requestAnimationFrame(() => {
        if (revealed === el) el.scrollIntoView({ block });
        if (revealed === el) revealed = null;
      }));
    };

    let stops = null; // what the arrows move through: names of nodes, modules, lines
    const allStops = () => (stops ??= [...main.querySelectorAll(".graph summary, .graph .d")]);
    let stop = null; // the one of them that the tab key reaches

    const setStop = (el) => {
      if (stop && stop !== el) stop.tabIndex = -1;
      stop = el;
      stop.tabIndex = 0;
    };

    const tame = () => {
      for (const el of main.querySelectorAll(".graph summary, .graph a")) el.tabIndex = -1;
      if (allStops().length) setStop(stop ?? allStops()[0]);
    };
    (window.requestIdleCallback ?? setTimeout)(tame);

    main.addEventListener("focusin", (event) => {
      if (event.target.matches(".graph summary, .graph .d")) setStop(event.target);
    });

    // --- search ---

    let items = null;
    let hits = [];
    let now = -1;

    const searched = () => {
      items ??= [...main.querySelectorAll(".r, .graph summary")].map((el) => [
        el, el.textContent.toLowerCase(),
      ]);
      return items;
    };

    const search = () => {
      for (const el of hits) el.classList.remove("hit", "now");
      const text = query.value.trim().toLowerCase();
      hits = text ? searched().filter((item) => item[1].includes(text)).map((item) => item[0]) : [];
      for (const el of hits) el.classList.add("hit");
      now = -1;
      status.textContent = text && !hits.length ? "no hit" : "";
      if (hits.length) go(1);
    };

    const go = (step) => {
      if (!hits.length) return;
      if (now >= 0) hits[now].classList.remove("now");
      now = now < 0 && step < 0 ? hits.length - 1 : (now + step + hits.length) % hits.length;
      hits[now].classList.add("now");
      reveal(hits[now]);
      status.textContent = `${now + 1} of ${hits.length} hits`;
    };

    const focusOn = (el) => {
      const target = el.matches(".r") ? el.querySelector(".d") ?? el : el;
      target.tabIndex = 0;
      target.focus({ preventScroll: true });
    };

    query.addEventListener("input", search);
    query.addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        go(event.shiftKey ? -1 : 1);
      } else if (event.key === "Escape") {
        event.preventDefault();
        if (hits.length) focusOn(hits[now]);
        else query.blur();
      }
    });
    $("next").addEventListener("click", () => go(1));
    $("previous").addEventListener("click", () => go(-1));

    // --- a node, and what uses it ---

    let marked = [];
    const unmark = () => {
      for (const el of marked) el.classList.remove("defined", "used", "use");
      marked = [];
    };
    const mark = (el, cls) => {
      el.classList.add(cls);
      marked.push(el);
    };

    const follow = () => {
      const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
      if (!target || !frame.contains(target)) return;
      unmark();
      if (!target.matches(".r")) return reveal(target);
      mark(target, "defined");
      const users = new Set();
      for (const link of main.querySelectorAll(`.s a[href="#${target.id}"]:not(.d)`)) {
        mark(link, "use");
        users.add(link.closest(".r"));
      }
      for (const row of users) mark(row, "used");
      reveal(target);
      focusOn(target);
      // The browser takes the focus off when it goes to a row, before or after this.
      requestAnimationFrame(() => {
        if (document.activeElement === document.body) focusOn(target);
      });
      const name = target.querySelector(".d").textContent;
      status.textContent = `${name}: used by ${users.size} ${users.size === 1 ? "node" : "nodes"}`;
    };
    window.addEventListener("hashchange", follow);
    frame.addEventListener("click", (event) => {
      const link = event.target.closest('a[href^="#"]');
      if (link && link.hash === location.hash) follow(); // which is no change of the hash
    });
    follow();

    // --- folding and keys ---

    const foldAll = (open) => {
      for (const el of main.querySelectorAll(".graph .mod")) el.open = open;
    };
    $("unfold").addEventListener("click", () => foldAll(true));
    $("fold").addEventListener("click", () => foldAll(false));

    const move = (from, step) => {
      const list = allStops();
      let at = list.indexOf(from);
      do at += step; while (list[at] && folded(list[at]));
      if (list[at]) {
        list[at].focus({ preventScroll: true });
        list[at].scrollIntoView({ block: "nearest" });
      }
    };

    const sideways = (el, right) => {
      if (el.matches("summary") && el.parentElement.open !== right) {
        el.parentElement.open = right;
        return;
      }
      const names = el.matches(".r a") ? [...el.closest(".r").querySelectorAll("a")] : [];
      const next = names[names.indexOf(el) + (right ? 1 : -1)];
      const around = (el.matches("summary") ? el.parentElement.parentElement : el).closest(".mod");
      if (next) next.focus();
      else if (!right && around) around.querySelector("summary").focus();
    };

    const arrows = { ArrowDown: 1, ArrowUp: -1, ArrowRight: true, ArrowLeft: false };

    const press = (event) => {
      const el = event.target;
      if (event.key in arrows && el.closest(".graph") && el.matches("summary, a")) {
        event.preventDefault();
        const way = arrows[event.key];
        if (typeof way === "boolean") sideways(el, way);
        else move(el.matches(".r a") ? el.closest(".r").querySelector(".d") : el, way);
      } else if (event.key === "Escape") {
        unmark();
      } else if ($("letters").checked && "/nN".includes(event.key)) {
        event.preventDefault();
        if (event.key === "/") {
          query.focus();
          query.select();
        } else {
          go(event.key === "n" ? 1 : -1);
        }
      }
    };

    // Paper shows what is folded, too.
    let closed = [];
    window.addEventListener("beforeprint", () => {
      closed = [...main.querySelectorAll(".mod:not([open])")];
      for (const el of closed) el.open = true;
    });
    window.addEventListener("afterprint", () => {
      for (const el of closed) el.open = false;
    });
    return press;
  };

  // --- the frames of the page; one that is folded starts when it is opened ---

  const pressed = new Map();
  let current = null;
  const frames = [...document.querySelectorAll(".frame")];
  const open = (frame) => {
    current = frame;
    if (!pressed.has(frame)) pressed.set(frame, start(frame));
  };
  const openTarget = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    const frame = target && target.closest(".frame");
    if (!frame) return;
    if ("open" in frame) frame.open = true;
    open(frame);
  };
  for (const frame of frames) {
    if (!("open" in frame) || frame.open) open(frame);
    frame.addEventListener("toggle", (event) => {
      if (event.target === frame && frame.open) open(frame);
    });
    frame.addEventListener("focusin", () => { current = frame; });
  }
  window.addEventListener("hashchange", openTarget);
  openTarget();

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
    const frame = event.target.closest(".frame") ?? current;
    if (pressed.has(frame)) pressed.get(frame)(event);
  });

  // --- commands to copy ---

  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const command = button.parentElement.querySelector(".command");
      getSelection().selectAllChildren(command);
      try {
        await navigator.clipboard.writeText(command.textContent);
        button.textContent = "Copied";
      } catch { // not permitted here: it is selected
        button.textContent = "Selected";
      }
    });
  }
})();
