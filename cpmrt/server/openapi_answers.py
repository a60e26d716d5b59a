"""The schemas of the bodies of answers in the OpenAPI document."""

from __future__ import annotations

from cpmrt.server.openapi_types import INTEGER, NUMBER, STRING, Schema, array, object_of, optional, ref


def answer_schemas() -> Schema:
    """Return the schemas of all answers by their names in the document."""
    error = {"message": STRING, "type": STRING, "param": optional("string"), "code": optional("string")}
    return {
        **_openai_answers(),
        **_anthropic_answers(),
        **_model_answers(),
        "Infill": object_of({"content": STRING, "stop": {"const": True}}, {"tokens_predicted": INTEGER}),
        "Tokens": object_of(
            {"tokens": array({"type": ["integer", "object"]}), "count": INTEGER},
            {"max_model_len": INTEGER, "token_strs": array(STRING)},
        ),
        "Text": object_of({"prompt": STRING, "content": STRING}),
        "TokenizerInfo": object_of({"vocab_size": INTEGER, "max_model_len": INTEGER}),
        "Health": object_of({"status": STRING}, {"model": STRING}),
        "Error": object_of({"error": object_of(error)}),
    }


def _openai_answers() -> Schema:
    """Return the schemas of answers of OpenAI's endpoints."""
    message = object_of(
        {"role": {"const": "assistant"}, "content": optional("string")},
        {"reasoning_content": STRING, "refusal": {"type": "null"}, "tool_calls": array({"type": "object"})},
    )
    reasons = ["stop", "length", "loop"]
    return {
        "ChatCompletion": _completion("chat.completion", {"message": message}, [*reasons, "tool_calls"]),
        "Completion": _completion("text_completion", {"text": STRING}, reasons),
        "Embeddings": object_of({
            "object": {"const": "list"},
            "data": array(object_of({"index": INTEGER, "embedding": {"type": ["array", "string"]}})),
            "model": STRING,
            "usage": object_of({"prompt_tokens": INTEGER, "total_tokens": INTEGER}),
        }),
        "Response": object_of({
            "id": STRING,
            "object": {"const": "response"},
            "created_at": INTEGER,
            "model": STRING,
            "status": {"enum": ["completed", "incomplete"]},
            "incomplete_details": optional("object"),
            "output": array(object_of({"id": STRING, "type": {"enum": ["message", "reasoning", "function_call"]}})),
            "usage": object_of(dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), INTEGER)),
        }),
    }


def _anthropic_answers() -> Schema:
    """Return the schemas of answers of Anthropic's endpoints."""
    return {
        "Message": object_of({
            "id": STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": STRING,
            "content": array(object_of({"type": {"enum": ["text", "thinking", "tool_use"]}})),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": optional("string"),
            "usage": object_of({"input_tokens": INTEGER, "output_tokens": INTEGER}),
        }),
        "Count": object_of({"input_tokens": INTEGER}),
        "MessageError": object_of(
            {"type": {"const": "error"}, "error": object_of({"type": STRING, "message": STRING})}
        ),
    }


def _model_answers() -> Schema:
    """Return the schemas of answers about the model that is served."""
    model = {"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING}
    numbers = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "loop_penalty"), NUMBER)
    defaults = object_of({**numbers, "top_k": INTEGER, "source": STRING})
    return {
        "Model": object_of(
            model, {"root": STRING, "max_model_len": INTEGER, "device": STRING, "sampling_defaults": defaults}
        ),
        "ModelList": object_of({"object": {"const": "list"}, "data": array(ref("Model"))}),
    }


def _completion(kind: str, content: Schema, reasons: list[str]) -> Schema:
    choice = {"index": INTEGER, **content, "logprobs": optional("object"), "finish_reason": {"enum": reasons}}
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), INTEGER)
    required = {
        "id": STRING,
        "object": {"const": kind},
        "created": INTEGER,
        "model": STRING,
        "choices": array(object_of(choice)),
        "usage": object_of({**counts, "prompt_tokens_details": object_of({"cached_tokens": INTEGER})}),
    }
    return object_of(required, {"system_fingerprint": STRING})
