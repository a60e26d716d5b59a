// The view of an empty conversation: the model, where it runs, and questions to begin with.

import { element } from "../dom.js";

const EXAMPLES = [
  ["Explain", "How does a hash table work? Show a small one in Python."],
  ["Compare", "Compare TCP and UDP in a table, then say when to use which."],
  ["Write", "Write a friendly message that moves a meeting from Monday to Wednesday."],
  ["Derive", "Derive the quadratic formula step by step."],
];

/** Fill the list of examples; `ask(text)` takes the one that is chosen. */
export function showExamples(list, ask) {
  list.replaceChildren(
    ...EXAMPLES.map(([verb, text]) =>
      element(
        "li",
        {},
        element(
          "button",
          { type: "button", onclick: () => ask(text) },
          element("strong", { text: verb }),
          element("span", { text }),
        ),
      ),
    ),
  );
}

/** Show what is known of the model; without `model` the `problem` that keeps it away. */
export function showModel(box, model, problem) {
  box.replaceChildren(...(model ? factsOf(model) : [problem]).map(text => element("li", { text })));
}

function factsOf({ id, device, max_model_len: length }) {
  return [id, device === "cpu" ? "CPU" : device, `${length.toLocaleString("en")} tokens of context`];
}
