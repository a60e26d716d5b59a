"""The markers in an answer: around thoughts and around tool calls. In some vocabularies they are tokens."""

THINKING_PAIRS = {"<think>": "</think>", "<|thought_start|>": "<|thought_end|>"}
"""The beginning of a thought -> its end: MiniCPM4.1, MiniCPM5 and Qwen; MiniCPM3."""
TOOL_MARKERS = (
    "<tool_call>", "</tool_call>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<function", "</function>", "<param", "</param>",
)  # fmt: skip
ANSWER_MARKERS = frozenset({*THINKING_PAIRS, *THINKING_PAIRS.values(), *TOOL_MARKERS})
