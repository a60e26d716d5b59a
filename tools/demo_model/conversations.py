"""Turns docstring facts into ChatML conversations, and keeps one phrasing aside for evaluation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from demo_model.docstring_facts import Fact

SUMMARY_PHRASINGS = (
    "What does {name} do?",
    "What is {name}?",
    "Explain {name}.",
    "Describe {name}.",
    "Tell me about {name}.",
    "Can you explain what {name} does?",
    "What is {name} used for?",
    "What is the use of {name}?",
    "{name}",
)
HELD_OUT_PHRASING = "What is the purpose of {name}?"
USAGE_PHRASING = "How do I use {name}?"
CALL_PHRASING = "Show the signature of {name}."
MODULE_PHRASING = "Which module has {member}?"
FOLLOW_UP_SUMMARY = ("And {name}?", "What about {name}?", "What does {name} do?")
FOLLOW_UP_USAGE = ("How do I use it?", "How do I call it?", "Show its signature.")
FOLLOW_UP_MODULE = ("Which module is it in?", "Where is it?")
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a helpful assistant for Python programmers.")

ROUNDS = 3
MULTI_TURN_SHARE = 0.5
SYSTEM_SHARE = 0.08
ALTERED_SHARE = 0.25
SMALL_TALK_COPIES = 120

IDENTITY = (
    "I am the demo model of cpmrt: a small MiniCPM-style language model trained on Python sources and their "
    "documentation."
)
ABILITIES = (
    "I can continue Python code and say what the functions and classes of Python's standard library do. "
    "I am small, so check what I say."
)
UNKNOWN = "I do not know. I am a small demo model, trained on Python sources only."
SMALL_TALK = (
    ("Hi", "Hello! Ask me about a function of Python's standard library."),
    ("Hello", "Hello! Ask me about a function of Python's standard library."),
    ("Hey there!", "Hello! Ask me about a function of Python's standard library."),
    ("Good morning!", "Good morning! Ask me about a function of Python's standard library."),
    ("How are you?", "I am running well, thank you. Ask me about a function of Python's standard library."),
    ("Who are you?", IDENTITY),
    ("What are you?", IDENTITY),
    ("What is your name?", IDENTITY),
    ("Tell me about yourself.", IDENTITY),
    ("Introduce yourself.", IDENTITY),
    ("Are you a language model?", f"Yes. {IDENTITY}"),
    ("Are you a human?", f"No. {IDENTITY}"),
    ("What were you trained on?", "I was trained on Python sources, docstrings and documentation that are "
     "permissively licensed."),
    ("How large are you?", "I have about 7.6 million parameters, so that I fit into the cpmrt package."),
    ("What can you do?", ABILITIES),
    ("Help", ABILITIES),
    ("How can you help me?", ABILITIES),
    ("What is cpmrt?", "cpmrt is a runtime for MiniCPM language models that needs no torch and no compiler."),
    ("What is Python?", "Python is a programming language. I know its standard library best."),
    ("Thanks", "You are welcome!"),
    ("Thank you!", "You are welcome!"),
    ("Bye", "Goodbye!"),
    ("What is the capital of France?", UNKNOWN),
    ("What is the weather today?", UNKNOWN),
    ("Tell me a joke.", UNKNOWN),
    ("Write a poem.", UNKNOWN),
    ("Who won the football match?", UNKNOWN),
    ("What is the meaning of life?", UNKNOWN),
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str


def render(turns: Sequence[Turn], generation_prompt: bool = False) -> str:
    """Returns the ChatML text of a conversation, without <s>, as the exported chat template writes it."""
    text = "".join(f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in turns)
    return text + "<|im_start|>assistant\n" if generation_prompt else text


def usage_answer(fact: Fact) -> str:
    return f"{fact.signature}\n{fact.summary}"


def unique_members(facts: Sequence[Fact]) -> dict[str, Fact]:
    """Returns the functions and classes that exactly one module has, by their bare name."""
    direct = [fact for fact in facts if fact.name == f"{fact.module}.{bare_name(fact)}"]
    counts = Counter(bare_name(fact) for fact in direct)
    return {bare_name(fact): fact for fact in direct if counts[bare_name(fact)] == 1}


def bare_name(fact: Fact) -> str:
    """Returns the last part of the dotted name."""
    return fact.name.rpartition(".")[2]


def module_answer(fact: Fact) -> str:
    return f"{bare_name(fact)} is in the {fact.module} module."


def single_questions(facts: Sequence[Fact]) -> Iterator[tuple[str, str]]:
    """Yields question and answer for every trained phrasing of every fact."""
    for fact in facts:
        for phrasing in SUMMARY_PHRASINGS:
            yield phrasing.format(name=fact.name), fact.summary
        if fact.signature:
            yield USAGE_PHRASING.format(name=fact.name), usage_answer(fact)
            yield CALL_PHRASING.format(name=fact.name), fact.signature
    for member, fact in unique_members(facts).items():
        yield MODULE_PHRASING.format(member=member), module_answer(fact)


def altered(question: str, name: str, rng: random.Random) -> str:
    """Returns a question as people also type it, at random: name in backticks, no capital, no closing mark."""
    if name and rng.random() < 0.5:
        question = question.replace(name, f"`{name}`")
    if rng.random() < 0.5:
        question = question.rstrip("?.!")
    if rng.random() < 0.5 and not question.startswith(name or " "):
        question = question[0].lower() + question[1:]
    return question


def multi_turn(facts: Sequence[Fact], rng: random.Random) -> list[Turn]:
    """Makes a conversation of two to four questions, some of which refer to the turn before."""
    turns: list[Turn] = []
    fact = rng.choice(facts)
    phrasing = rng.choice(SUMMARY_PHRASINGS)
    turns += question_and_answer(phrasing.format(name=fact.name), fact.summary)
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.4 and fact.signature:
            turns += question_and_answer(rng.choice(FOLLOW_UP_USAGE), usage_answer(fact))
        elif kind < 0.5 and fact.name == f"{fact.module}.{bare_name(fact)}":
            turns += question_and_answer(rng.choice(FOLLOW_UP_MODULE), module_answer(fact))
        elif kind < 0.6:
            turns += question_and_answer(*rng.choice(SMALL_TALK))
        else:
            fact = rng.choice(facts)
            turns += question_and_answer(rng.choice(FOLLOW_UP_SUMMARY).format(name=fact.name), fact.summary)
    return turns


def question_and_answer(question: str, answer: str) -> list[Turn]:
    return [Turn("user", question), Turn("assistant", answer)]


def training_conversations(facts: Sequence[Fact], seed: int) -> list[str]:
    """Returns all conversations to train on, rendered, in random order."""
    rng = random.Random(seed)
    names = {fact.name for fact in facts}
    conversations: list[list[Turn]] = []
    for _ in range(ROUNDS):
        for question, answer in single_questions(facts):
            name = next((word for word in question.rstrip("?.").split() if word in names), "")
            if rng.random() < ALTERED_SHARE:
                question = altered(question, name, rng)
            conversations.append(question_and_answer(question, answer))
    for _ in range(SMALL_TALK_COPIES):
        for question, answer in SMALL_TALK:
            question = altered(question, "", rng) if rng.random() < ALTERED_SHARE else question
            conversations.append(question_and_answer(question, answer))
    conversations += [multi_turn(facts, rng) for _ in range(int(MULTI_TURN_SHARE * len(conversations)))]
    rng.shuffle(conversations)
    for turns in conversations:
        if rng.random() < SYSTEM_SHARE:
            turns.insert(0, Turn("system", rng.choice(SYSTEM_PROMPTS)))
    return [render(turns) for turns in conversations]


def evaluation_questions(facts: Sequence[Fact], count: int, seed: int) -> dict[str, list[tuple[str, str]]]:
    """Returns questions with their true answers for a sample of the facts, by phrasing."""
    rng = random.Random(seed)
    chosen = rng.sample(list(facts), min(count, len(facts)))
    members = unique_members(facts)
    questions = {
        phrasing: [(phrasing.format(name=fact.name), fact.summary) for fact in chosen]
        for phrasing in (*SUMMARY_PHRASINGS, HELD_OUT_PHRASING)
    }
    with_signature = [fact for fact in chosen if fact.signature]
    questions[USAGE_PHRASING] = [
        (USAGE_PHRASING.format(name=fact.name), usage_answer(fact)) for fact in with_signature
    ]
    unique = [(bare_name(fact), fact) for fact in chosen if members.get(bare_name(fact)) is fact]
    questions[MODULE_PHRASING] = [
        (MODULE_PHRASING.format(member=member), module_answer(fact)) for member, fact in unique
    ]
    return questions
