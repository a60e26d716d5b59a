// What an empty conversation shows: the model, where it runs, and questions to begin with.

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
  const facts = model
    ? [model.device === "cpu" ? "CPU" : model.device, model.max_model_len && `${model.max_model_len.toLocaleString("en")} tokens of context`]
    : [problem];
  box.replaceChildren(...facts.filter(Boolean).map(text => element("li", { text })));
}
