// The picture of a graph: modules are boxes that unfold, in layers from the inputs to the outputs.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const CHARACTER = 7.3; // width of a character of a label
  const SMALL = 6.4; // of a note
  const GAP = 16;
  const BETWEEN = 30; // layers
  const PAD = 14;
  const MANY = 80; // more boxes than this side by side are put into runs
  const OPENED = 30; // boxes that are seen at first
  const NAMED = 12; // more values than this that enter a box are one
  let pictures = 0;

  // --- layout: boxes of one container, whose sizes are known, in layers ---

  // Return positions with the given distances that are nearest to the desired ones.
  const apart = (desired, distances) => {
    const blocks = [];
    let offset = 0;
    desired.forEach((x, i) => {
      offset += i ? distances[i - 1] : 0;
      let block = { sum: x - offset, count: 1 };
      while (blocks.length && blocks.at(-1).sum / blocks.at(-1).count > block.sum / block.count) {
        const before = blocks.pop();
        block = { sum: before.sum + block.sum, count: before.count + block.count };
      }
      blocks.push(block);
    });
    const found = [];
    let at = 0;
    offset = 0;
    for (const block of blocks) {
      for (let i = 0; i < block.count; i++, at++) {
        offset += at ? distances[at - 1] : 0;
        found.push(block.sum / block.count + offset);
      }
    }
    return found;
  };

  const mean = (list) => list.reduce((sum, v) => sum + v.x, 0) / list.length;

  // Place vertices ({w, h, next: targets}), which are in an order in which edges go forward.
  // Return {w, h, edges: [{from, to, points}]}; each vertex gets x (of its middle) and y.
  const layered = (vertices) => {
    for (const v of vertices) Object.assign(v, { rank: 0, ups: [], downs: [], before: 0 });
    for (const v of vertices) {
      for (const to of v.next) {
        to.rank = Math.max(to.rank, v.rank + 1);
        to.before += 1;
      }
    }
    for (const v of [...vertices].reverse()) { // what starts late is above what uses it
      if (!v.before && v.next.length) v.rank = Math.min(...v.next.map((to) => to.rank)) - 1;
    }
    const ranks = [];
    for (const v of vertices) (ranks[v.rank] ??= []).push(v);
    for (let r = 0; r < ranks.length; r++) ranks[r] ??= [];

    // A chain of points leads from each vertex through the layers to what uses it.
    const links = [];
    const link = (a, b, from, to) => {
      a.downs.push(b);
      b.ups.push(a);
      links.push({ a, b, from, to });
    };
    for (const v of vertices) {
      let at = v;
      const targets = [...v.next].sort((a, b) => a.rank - b.rank);
      for (const to of targets) {
        while (at.rank < to.rank - 1) {
          const point = { w: 0, h: 0, rank: at.rank + 1, ups: [], downs: [], isPoint: true };
          ranks[point.rank].push(point);
          link(at, point, v, null);
          at = point;
        }
        link(at, to, v, to);
      }
    }

    const order = (r, side) => {
      ranks[r].forEach((v, i) => {
        v.key = v[side].length ? v[side].reduce((sum, u) => sum + u.index, 0) / v[side].length : i;
      });
      ranks[r].sort((a, b) => a.key - b.key);
      ranks[r].forEach((v, i) => { v.index = i; });
    };
    ranks.forEach((row) => row.forEach((v, i) => { v.index = i; }));
    for (let pass = 0; pass < 4; pass++) {
      for (let r = 1; r < ranks.length; r++) order(r, "ups");
      for (let r = ranks.length - 2; r >= 0; r--) order(r, "downs");
    }

    const distances = ranks.map((row) =>
      row.slice(1).map((v, i) => (v.w + row[i].w) / 2 + (v.isPoint || row[i].isPoint ? GAP / 2 : GAP)));
    const place = (r, side) => {
      const row = ranks[r];
      const desired = row.map((v) => (side && v[side].length ? mean(v[side]) : v.x));
      apart(desired, distances[r]).forEach((x, i) => { row[i].x = x; });
    };
    ranks.forEach((row, r) => {
      row.forEach((v) => { v.x = 0; });
      place(r);
    });
    for (let pass = 0; pass < 4; pass++) {
      for (let r = 1; r < ranks.length; r++) place(r, "ups");
      for (let r = ranks.length - 2; r >= 0; r--) place(r, "downs");
    }

    const all = ranks.flat();
    const left = Math.min(0, ...all.map((v) => v.x - v.w / 2));
    let y = 0;
    for (const row of ranks) {
      const height = Math.max(0, ...row.map((v) => v.h));
      for (const v of row) {
        v.x -= left;
        v.y = y;
        v.bottom = v.isPoint ? y + height : y + v.h;
      }
      y += height + BETWEEN;
    }
    const edges = links.map(({ a, b, from, to }) => {
      const [y0, y1] = [a.bottom, b.y];
      const middle = (y0 + y1) / 2;
      const through = b.isPoint ? ` V ${b.bottom}` : "";
      const x0 = a.x + (a.out ?? 0);
      const path = `M ${x0} ${y0} C ${x0} ${middle} ${b.x} ${middle} ${b.x} ${y1}${through}`;
      return { from, to, path };
    });
    const width = Math.max(0, ...all.map((v) => v.x + v.w / 2));
    return { w: width, h: Math.max(0, y - BETWEEN), edges };
  };

  // --- one picture ---

  const start = (picture) => {
    const { prefix } = picture.closest(".frame").dataset;
    const flow = JSON.parse(picture.querySelector("script").textContent);
    const canvas = picture.querySelector(".canvas");
    const number = pictures++;
    const failing = new Set(flow.failing.map(([g, at]) => `${g}-${at}`));
    const users = flow.graphs.map(() => null);
    const owners = flow.graphs.map((graph) => new Int32Array(graph.labels.length));
    const stamps = flow.graphs.map((graph) => new Int32Array(graph.labels.length));
    let stamp = 0;

    const usersOf = (g) => {
      if (!users[g]) {
        users[g] = flow.graphs[g].uses.map(() => []);
        flow.graphs[g].uses.forEach((used, at) => used.forEach((i) => users[g][i].push(at)));
      }
      return users[g];
    };
    const row = (g, at) => document.getElementById(`${prefix}n${g}-${at}`);
    const part = (g, at, selector) => row(g, at)?.querySelector(selector)?.textContent ?? "";
    const operator = (g, at) => flow.operators[flow.graphs[g].labels[at]];
    const clip = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);

    // Items: {key, kind, label, note, graph, nodes, open, parts}; parts are made when they are asked for.
    const item = (kind, graph, nodes, label, note, parts, up) => ({
      kind, graph, nodes, label: clip(label, 36), note: clip(note, 38), parts, up, open: false,
      key: `${kind} ${graph} ${nodes[0] ?? ""} ${label}`,
      fails: kind !== "entry" && nodes.some((at) => failing.has(`${graph}-${at}`)),
    });

    const nodeItem = (g, at, up) => {
      const bodies = flow.graphs[g].inner[at] ?? [];
      const inside = bodies.length
        ? (self) => (bodies.length === 1
          ? items(bodies[0], flow.graphs[bodies[0]].parts, self)
          : bodies.map((b) => {
            const parts = flow.graphs[b].parts;
            return item("group", b, positions(parts), `graph ${b}`, "", (body) => items(b, parts, body), self);
          }))
        : null;
      const made = item("node", g, [at], operator(g, at), part(g, at, ".t"), inside, up);
      if (bodies.length) made.fails ||= bodies.some((b) => flow.failing.some(([graph]) => graph === b));
      return made;
    };

    const positions = (parts) => parts.flatMap((each) => (each.length === 3 ? positions(each[2]) : each[1]));

    const fewer = (made, up) => {
      if (made.length <= MANY) return made;
      const length = Math.ceil(made.length / Math.min(MANY / 2, Math.ceil(made.length / 20)));
      const runs = [];
      for (let at = 0; at < made.length; at += length) {
        const some = made.slice(at, at + length);
        const nodes = some.flatMap((each) => each.nodes);
        const ends = `${some[0].label} \u2026 ${some.at(-1).label}`;
        const run = item("group", some[0].graph, nodes, ends, `${nodes.length} nodes`, null, up);
        run.parts = () => fewer(some, run);
        for (const each of some) each.up = run;
        runs.push(run);
      }
      return runs;
    };

    const items = (g, parts, up) => fewer(parts.map((each) => {
      if (each.length === 3) {
        const [name, cls, inside] = each;
        const nodes = positions(inside);
        const count = nodes.length === 1 ? "1 node" : `${nodes.length} nodes`;
        return item("group", g, nodes, name, `${cls === name ? "" : `${cls} \u00b7 `}${count}`,
          (self) => items(g, inside, self), up);
      }
      const [code, nodes] = each;
      if (nodes.length === 1) return nodeItem(g, nodes[0], up);
      const words = [...new Set(nodes.map((at) => operator(g, at)))].join(", ");
      return item("line", g, nodes, words, code, (self) => fewer(nodes.map((at) => nodeItem(g, at, self)), self), up);
    }), up);

    const children = (each) => (each.made ??= each.parts(each));

    const top = item("top", 0, [], "", "", () => items(0, flow.graphs[0].parts, top), null);
    top.open = true;

    // Return the values that enter a container, from outside of it or its graph's inputs.
    const entryOf = (g, at, self) => {
      const isInput = flow.operators[flow.graphs[g].labels[at]] === "placeholder";
      const name = part(g, at, ".d") || operator(g, at);
      const kind = isInput && self === top ? "input" : "entry";
      return item(kind, g, [at], name, kind === "input" ? part(g, at, ".t") : "", null, self);
    };

    // Compute the sizes of a box, and of what is in it; places are relative to the container.
    const measure = (each) => {
      if (!each.open) {
        const isSmall = each.kind === "entry";
        const text = Math.max(each.label.length * CHARACTER, each.note.length * SMALL);
        each.out = 0;
        each.w = text + (isSmall ? 12 : 24) + (each.parts && each.kind !== "top" ? 14 : 0);
        each.h = isSmall ? 18 : each.note ? 38 : 24;
        return each;
      }
      const inside = children(each).map(measure);
      const mark = ++stamp;
      inside.forEach((kid, i) => kid.nodes.forEach((at) => {
        stamps[kid.graph][at] = mark;
        owners[kid.graph][at] = i;
      }));
      const entries = new Map();
      const exit = { w: 0, h: 0, next: [], kind: "exit" };
      for (const kid of inside) kid.next = [];
      const edge = (from, to) => {
        if (from !== to && !from.next.includes(to)) from.next.push(to);
      };
      for (const kid of inside) {
        const { uses } = flow.graphs[kid.graph];
        for (const at of kid.nodes) {
          for (const used of uses[at]) {
            if (stamps[kid.graph][used] === mark) {
              edge(inside[owners[kid.graph][used]], kid);
            } else {
              const key = `${kid.graph}-${used}`;
              if (!entries.has(key)) entries.set(key, { g: kid.graph, at: used, to: new Set() });
              entries.get(key).to.add(kid);
            }
          }
          if (each !== top && usersOf(kid.graph)[at].some((i) => stamps[kid.graph][i] !== mark)) {
            edge(kid, exit);
          }
        }
      }
      let entered = [...entries.values()].map(({ g, at, to }) => {
        const made = entryOf(g, at, each);
        made.next = [...to];
        return measure(made);
      });
      if (each !== top && entered.length > NAMED) {
        const one = item("entry", each.graph, [], `${entered.length} values`, "", null, each);
        one.next = [...new Set(entered.flatMap((made) => made.next))];
        entered = [measure(one)];
      }
      const vertices = [...entered, ...inside, ...(inside.some((kid) => kid.next.includes(exit)) ? [exit] : [])];
      const placed = layered(vertices);
      each.layout = { boxes: [...entered, ...inside], edges: placed.edges, w: placed.w };
      if (each === top) {
        each.w = placed.w + 2 * PAD;
        each.h = placed.h + 2 * PAD;
        return each;
      }
      each.w = Math.max(placed.w + 2 * PAD, each.label.length * CHARACTER + each.note.length * SMALL + 52);
      const leaves = vertices.at(-1) === exit;
      each.h = placed.h + 28 + (leaves ? 0 : PAD); // what leaves ends at the border, and goes on there
      each.out = leaves ? exit.x - placed.w / 2 : 0;
      return each;
    };

    // --- drawing ---

    const element = (name, attributes, ...parts) => {
      const made = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      made.append(...parts);
      return made;
    };
    const round = (path) => path.replace(/-?\d+\.\d+/g, (x) => (+x).toFixed(1));

    let stops = []; // boxes in the order of the arrow keys
    let scale = 1;
    let svg = null;

    const box = (each) => {
      const fold = each.parts !== null;
      const words = [each.label, each.note, each.fails ? "the backend failed here" : ""].filter(Boolean);
      const g = element("g", {
        class: `box ${each.kind}${each.open ? " open" : ""}${each.fails ? " failing" : ""}`,
        transform: `translate(${(each.x - each.w / 2).toFixed(1)} ${each.y.toFixed(1)})`,
      });
      const head = element("g", { class: "head", tabindex: -1, role: "button", "aria-label": words.join(", ") });
      if (fold) head.setAttribute("aria-expanded", each.open);
      head.append(element("title", {}, words.join("\n")));
      const round_ = each.kind === "entry" || each.kind === "input" ? 9 : 4;
      head.append(element("rect", { width: each.w.toFixed(1), height: each.h.toFixed(1), rx: round_ }));
      const left = each.open || fold;
      const x = left ? 10 : each.w / 2;
      const anchor = left ? "start" : "middle";
      const sign = fold ? `${each.open ? "\u2212" : "+"} ` : "";
      const y = each.kind === "entry" ? 13 : 16;
      head.append(element("text", { x, y, "text-anchor": anchor, class: "label" }, sign + each.label));
      if (each.note && each.open) {
        const after = 10 + (sign.length + each.label.length + 1) * CHARACTER;
        head.append(element("text", { x: after, y: 16, class: "note" }, each.note));
      } else if (each.note) {
        const at = left ? 10 + 2 * CHARACTER : x;
        head.append(element("text", { x: at, y: 31, "text-anchor": anchor, class: "note" }, each.note));
      }
      g.append(head);
      each.edges = [];
      head.item = each;
      each.head = head;
      stops.push(head);
      if (each.open) {
        const inside = element("g", { transform: `translate(${((each.w - each.layout.w) / 2).toFixed(1)} 28)` });
        inside.append(...contents(each));
        g.append(inside);
      }
      return g;
    };

    const contents = (each) => {
      const boxes = each.layout.boxes.map(box);
      const edges = each.layout.edges.map(({ from, to, path }) => {
        const marker = to && to.kind !== "exit" ? { "marker-end": `url(#arrow${number})` } : {};
        const line = element("path", { d: round(path), class: "edge", ...marker });
        for (const end of [from, to]) end?.edges?.push(line);
        return line;
      });
      return [...edges, ...boxes];
    };

    let current = null;
    const select = (head, focus) => {
      if (current) current.tabIndex = -1;
      current = head;
      current.setAttribute("tabindex", 0);
      if (focus) current.focus({ preventScroll: true });
    };

    const resize = () => {
      svg.setAttribute("width", Math.round(top.w * scale));
      svg.setAttribute("height", Math.round(top.h * scale));
    };

    const draw = (key) => {
      measure(top);
      stops = [];
      const arrow = element("marker", {
        id: `arrow${number}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto",
      }, element("path", { d: "M 0 0 L 8 4 L 0 8 z", class: "arrow" }));
      const all = element("g", { transform: `translate(${PAD} ${PAD})` }, ...contents(top));
      svg = element("svg", {
        viewBox: `0 0 ${Math.ceil(top.w)} ${Math.ceil(top.h)}`, role: "group", "aria-label": "Picture of the graph",
      }, element("defs", {}, arrow), all);
      resize();
      canvas.replaceChildren(svg);
      if (stops.length) select(stops.find((head) => head.item.key === key) ?? stops[0], key !== undefined);
      follow();
    };

    const toggle = (each, open = !each.open) => {
      const before = each.head.getBoundingClientRect();
      each.open = open;
      draw(each.key);
      const after = each.head.getBoundingClientRect(); // what was clicked stays where it is
      canvas.scrollLeft += after.left - before.left;
      canvas.scrollTop += after.top - before.top;
    };

    const press = (each) => {
      if (each.parts) toggle(each);
      else if (each.nodes.length) location.hash = `${prefix}n${each.graph}-${each.nodes[0]}`;
    };

    canvas.addEventListener("click", (event) => {
      const head = event.target.closest(".head");
      if (!head) return;
      select(head, true);
      press(head.item);
    });

    canvas.addEventListener("keydown", (event) => {
      const head = event.target.closest(".head");
      if (!head || event.ctrlKey || event.metaKey || event.altKey) return;
      const each = head.item;
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step) {
        const next = stops[stops.indexOf(head) + step];
        if (next) {
          select(next, true);
          next.scrollIntoView({ block: "nearest", inline: "nearest" });
        }
      } else if (event.key === "ArrowRight" && each.parts && !each.open) toggle(each);
      else if (event.key === "ArrowLeft" && each.open) toggle(each);
      else if (event.key === "ArrowLeft" && each.up && each.up !== top) select(each.up.head, true);
      else if (event.key === "Enter" || event.key === " ") press(each);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });

    for (const [name, on] of [["pointerover", true], ["focusin", true], ["pointerout", false], ["focusout", false]]) {
      canvas.addEventListener(name, (event) => {
        for (const line of event.target.closest(".head")?.item.edges ?? []) line.classList.toggle("on", on);
      });
    }

    picture.querySelector(".zoom").addEventListener("click", (event) => {
      const what = event.target.dataset.do;
      if (what === "fold") {
        const close = (each) => {
          for (const kid of each.made ?? []) {
            kid.open = false;
            close(kid);
          }
        };
        close(top);
        draw();
      } else if (what) {
        const fit = Math.min(1, (canvas.clientWidth - 4) / top.w);
        scale = what === "fit" ? fit : Math.min(4, Math.max(0.1, scale * (what === "larger" ? 1.25 : 0.8)));
        resize();
      }
    });

    // Mark the box that has the node of the address.
    const follow = () => {
      for (const el of canvas.querySelectorAll(".here")) el.classList.remove("here");
      const [, g, at] = /n(\d+)-(\d+)$/.exec(location.hash) ?? [];
      if (g === undefined || location.hash !== `#${prefix}n${g}-${at}`) return;
      let here = null;
      for (const head of stops) {
        const { kind, graph, nodes } = head.item;
        if (kind !== "entry" && graph === +g && nodes.includes(+at)) here = head;
      }
      if (!here) return;
      here.parentElement.classList.add("here");
      const seen = canvas.getBoundingClientRect();
      const place = here.getBoundingClientRect();
      if (!picture.contains(document.activeElement)) {
        canvas.scrollTop += place.top - seen.top - (seen.height - Math.min(place.height, seen.height)) / 2;
        canvas.scrollLeft += place.left - seen.left - (seen.width - Math.min(place.width, seen.width)) / 2;
      }
    };
    window.addEventListener("hashchange", follow);

    // Unfold the outer modules, and where the backend failed.
    const reveal = () => {
      let count = children(top).length;
      const todo = [...children(top)];
      while (todo.length) {
        const each = todo.shift();
        if (!each.parts || (each.kind === "node" && !each.fails)) continue;
        const inside = children(each);
        if (!each.fails && count + inside.length > OPENED) continue;
        each.open = each.fails || each.kind === "group";
        if (!each.open) continue;
        count += inside.length;
        todo.push(...inside);
      }
    };
    reveal();
    draw();
    const failed = stops.findLast((head) => head.item.fails);
    if (failed) {
      const seen = canvas.getBoundingClientRect();
      const place = failed.getBoundingClientRect();
      canvas.scrollTop += (place.top + place.bottom) / 2 - seen.top - seen.height / 2;
      canvas.scrollLeft += (place.left + place.right) / 2 - seen.left - seen.width / 2;
    }
  };

  for (const picture of document.querySelectorAll(".picture")) {
    picture.hidden = false;
    let isDrawn = false;
    const once = () => {
      if (isDrawn || !picture.open || !picture.checkVisibility()) return;
      isDrawn = true;
      start(picture);
    };
    picture.addEventListener("toggle", once);
    document.addEventListener("toggle", once, true); // of what is around it
    (window.requestIdleCallback ?? setTimeout)(once);
  }
})();
