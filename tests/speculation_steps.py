"""One sequence on an executor, by plain and speculative steps in turn, and the settings that must not matter."""

from __future__ import annotations

from itertools import cycle

from cpmrt.config import Sampling
from cpmrt.executor import Admit, Decode, Prefill, Recall, Release, Speculate

SETTINGS = {
    "greedy": Sampling(),
    "greedy with penalties": Sampling(repetition_penalty=1.3, frequency_penalty=0.3, logprobs=3),
    "sampled": Sampling(temperature=1.0, logprobs=2),
    "filtered": Sampling(temperature=0.8, top_p=0.9, top_k=9, presence_penalty=0.4),
    "biased": Sampling(temperature=1.3, min_p=0.05, repetition_penalty=1.1, logit_bias=((5, 1.0),)),
}


def prefill(executor, slot, prompt, sampling, *, seed=3, count=12, stop=(), table=(), start=0):
    executor.submit(Admit(slot, sampling, seed, count, stop, table)).wait()
    if start:
        executor.submit(Recall(slot, prompt[:start])).wait()
    chunk = executor.limits.prefill_chunk
    for begin in range(start, len(prompt), chunk):
        tokens = prompt[begin : begin + chunk]
        (result,) = executor.submit(Prefill(slot, tokens, begin, begin + chunk >= len(prompt))).wait().slots
    return result


def generate(executor, prompt, sampling, steps=("decode",), **arguments):
    """Generate in slot 0 with the kinds of steps in turn; return (tokens, logprobs) and each step's number of tokens.

    `steps` are "decode" or numbers of tree shapes.
    """
    results = [prefill(executor, 0, prompt, sampling, **arguments)]
    for kind in cycle(steps):
        step = Decode((0,)) if kind == "decode" else Speculate((0,), kind)
        (result,) = executor.submit(step).wait().slots
        if not result.token_ids:
            break
        results.append(result)
    executor.submit(Release(0)).wait()
    return joined(results), [len(result.token_ids) for result in results[1:]]


def together(executor, cases, steps):
    """Generate several sequences in the same steps; return for each what `generate` returns.

    `cases` are prompt, sampling and number of tokens of each slot, whose number is its seed. Every other step has its
    slots in reverse order. `steps` are as in `generate`.
    """
    results = [
        [prefill(executor, slot, prompt, sampling, seed=slot, count=count)]
        for slot, (prompt, sampling, count) in enumerate(cases)
    ]
    slots = tuple(range(len(cases)))
    for turn, kind in enumerate(cycle(steps)):
        order = slots[::-1] if turn % 2 else slots
        step = Decode(order) if kind == "decode" else Speculate(order, kind)
        found = executor.submit(step).wait().slots
        if not any(result.token_ids for result in found):
            break
        for slot, result in zip(order, found, strict=True):
            results[slot].append(result)
    for slot in slots:
        executor.submit(Release(slot)).wait()
    return [(joined(own), [len(result.token_ids) for result in own[1:] if result.token_ids]) for own in results]


def joined(results):
    return (
        tuple(token for result in results for token in result.token_ids),
        tuple(entry for result in results for entry in result.logprobs),
    )


def beside_a_neighbour(executor, prompt, other, steps, count):
    """Return what a sequence of `count` tokens in slot 0 gives, and what its neighbour in slot 1 gives.

    The neighbour is admitted before it and decodes plainly after it.
    """
    greedy = Sampling()
    neighbour = [prefill(executor, 1, other, greedy, count=21)]
    own = generate(executor, prompt, greedy, steps, count=count)[0]
    neighbour += [executor.submit(Decode((1,))).wait().slots[0] for _ in range(20)]
    return own, joined(neighbour)
