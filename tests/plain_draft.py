"""An EAGLE draft in float64 loops, one row at a time: the oracle for the tools that train and measure drafts."""

from __future__ import annotations

import numpy as np


class PlainDraft:
    """An EAGLE draft that computes one row at a time, in float64 loops, by exactly the formulas of the papers."""

    def __init__(self, config, tensors, embeddings, head, rope, features, ids):
        """Convert a draft's `tensors` and what it takes from its target to float64.

        `embeddings` and `head` are scaled as the target's are; `rope` holds cos and sin; `features` are [B, L, n];
        `ids` are the target's token ids of the head's rows, or None if they are the same.
        """
        self.config, self.method, self.ids = config, config.method, ids
        self.weights = {name: array.astype(np.float64) for name, array in tensors.items()}
        self.prefix = {"eagle2": "model.eagle_layers.0.", "eagle3": "midlayer."}[self.method]
        self.embeddings, self.head, self.features = embeddings, head.astype(np.float64), features.astype(np.float64)
        self.rope = [part.astype(np.float64) for part in rope]

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean() + self.config.rms_norm_eps) * self.weights[name]

    def rotated(self, x, position):
        first, second = np.split(x, 2, axis=-1)
        cos, sin = (part[position] for part in self.rope)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    def row(self, token, features, position, seen, is_first):
        """Return the output g and the (key, value) of one row that sees the rows `seen` and itself."""
        w, layer, config = self.weights, self.prefix, self.config
        group = config.num_attention_heads // config.num_key_value_heads
        e = self.embeddings[token].astype(np.float64)
        if self.method == "eagle2":
            joined = np.concatenate((self.norm(e, "model.input_norm1.weight"),
                                     self.norm(features, "model.input_norm2.weight")))  # fmt: skip
            u = w["model.fc.weight"] @ joined
            x = self.norm(u, layer + "input_layernorm.weight")
        else:
            u = w["fc.weight"] @ features if is_first else features
            x = np.concatenate((self.norm(e, layer + "input_layernorm.weight"),
                                self.norm(u, layer + "hidden_norm.weight")))  # fmt: skip
        head_dim = config.head_dim
        q, k, v = ((w[f"{layer}self_attn.{part}_proj.weight"] @ x).reshape(-1, head_dim) for part in "qkv")
        q, own = self.rotated(q, position), (self.rotated(k, position), v)
        mixed = []
        for head in range(config.num_attention_heads):
            rows = [*seen, own]
            scores = np.array([q[head] @ key[head // group] for key, _ in rows]) / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            mixed.append(
                sum(p * value[head // group] for p, (_, value) in zip(weights / weights.sum(), rows, strict=True))
            )
        h = u + config.residual_scale * (w[layer + "self_attn.o_proj.weight"] @ np.concatenate(mixed))
        y = self.norm(h, layer + "post_attention_layernorm.weight")
        gate, up = w[layer + "mlp.gate_proj.weight"] @ y, w[layer + "mlp.up_proj.weight"] @ y
        inner = gate / (1 + np.exp(-gate)) * up
        return h + config.residual_scale * (w[layer + "mlp.down_proj.weight"] @ inner), own

    def scores(self, g):
        """Return the log-probabilities of output `g` over the draft's vocabulary."""
        if self.method == "eagle2":
            logits = self.head @ g
        else:
            logits = self.weights["lm_head.weight"] @ self.norm(g, "norm.weight")
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def real_rows(self, tokens, row, root):
        """Return the outputs and the (key, value) pairs of the text's rows up to `root`."""
        outputs, seen = [], []
        for q in range(root + 1):
            g, own = self.row(int(tokens[row, q + 1]), self.features[row, q], q, seen, True)
            outputs.append(g)
            seen.append(own)
        return outputs, seen

    def tree(self, tokens, row, root, shape):
        """Return the tree's nodes as paths of tokens: the best of all candidates of all passes."""
        outputs, seen = self.real_rows(tokens, row, root)
        frontier, found = [((), 0.0, outputs[-1], [])], []
        for index in range(shape.num_passes):
            fresh = []
            for path, score, features, ancestors in frontier:
                g = features
                if index:
                    g, own = self.row(path[-1], features, root + index, seen + ancestors, False)
                    ancestors = [*ancestors, own]
                best = np.argsort(-self.scores(g), kind="stable")[: shape.top_k]
                names = best if self.ids is None else self.ids[best]
                fresh += [
                    ((*path, int(name)), score + self.scores(g)[token], g, ancestors)
                    for token, name in zip(best, names, strict=True)
                ]
            found += fresh
            frontier = sorted(fresh, key=lambda node: -node[1])[: shape.top_k]
        return [node[0] for node in sorted(found, key=lambda node: -node[1])[: shape.tree_size - 1]]
