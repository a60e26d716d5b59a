"""structs.py: its structs match the kernel header's, steps are written to commands, and results are read from
records."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from cpmrt.config import Sampling
from cpmrt.config.speculation import MAX_CANDIDATES, MAX_NODES
from cpmrt.cuda.build import modules as compiler
from cpmrt.cuda.build import nvrtc
from cpmrt.cuda.build.source import with_headers
from cpmrt.cuda.draft.structs import DRAFT_TREE, MAX_TOP_K, MAX_TREES
from cpmrt.cuda.step import structs as ss
from cpmrt.cuda.step.commands import command_bytes, slot_state, write_slots, write_step
from cpmrt.cuda.step.rings import answered_tokens, step_result
from cpmrt.dtypes import DType
from cpmrt.errors import KernelCompileError, RequestError
from cpmrt.executor import Admit, MaskFailure, Prefill, Recall, SlotResult, TokenLogprobs
from cpmrt.memory.caches import PAGE_SIZE

VOCAB, CHUNK, PAGES = 64, 8, 5
STRUCTS = {
    "SlotState": ss.SLOT_STATE,
    "Command": ss.COMMAND,
    "TokenLogprobs": ss.TOKEN_LOGPROBS,
    "ResultRecord": ss.RESULT_RECORD,
    "StepContext": ss.STEP_CONTEXT,
    "DraftTree": DRAFT_TREE,
}
CONSTANTS = {
    "kMaxStopIds": ss.MAX_STOP_IDS,
    "kMaxLogitBias": ss.MAX_LOGIT_BIAS,
    "kBiased": int(ss.BIASED),
    "kMaxLogprobs": ss.MAX_LOGPROBS,
    "kMaxRows": ss.MAX_ROWS,
    "kRingEntries": ss.RING_ENTRIES,
    "kSeen": int(ss.SEEN),
    "kNoToken": ss.NO_TOKEN,
    "kNonFinite": ss.NON_FINITE,
    "kNoMask": ss.NO_MASK,
    "kCutNode": ss.CUT_NODE,
    "kNothingAllowed": ss.NOTHING_ALLOWED,
    "kAdmit": ss.ADMIT,
    "kPrefill": ss.PREFILL,
    "kDecode": ss.DECODE,
    "kRecall": ss.RECALL,
    "kSpeculate": ss.SPECULATE,
    "kCatchUp": ss.CATCH_UP,
    "kPageTokens": PAGE_SIZE,
    "kMaxNodes": MAX_NODES,
    "kMaxCandidates": MAX_CANDIDATES,
    "kMaxTopK": MAX_TOP_K,
    "kMaxTrees": MAX_TREES,
}


def compile_claims(claims: list[str]) -> None:
    lines = ['#include "draft_tree.cuh"', *(f'static_assert({claim}, "{claim}");' for claim in claims)]
    source = with_headers("draft/claims.cu", "\n".join(lines).encode())
    nvrtc.compile_cubin(source, compiler.options("sm_80", DType.BFLOAT16, {}))


@pytest.fixture
def needs_nvrtc() -> None:
    if nvrtc.version() is None:
        pytest.skip("no NVRTC: pip install 'cpmrt[dev]'")


def claims_of_structs() -> list[str]:
    claims = [f"{name} == {value}" for name, value in CONSTANTS.items()]
    for struct, dtype in STRUCTS.items():
        claims.append(f"sizeof({struct}) == {dtype.itemsize}")
        for name, field in dtype.fields.items():
            claims.append(f"__builtin_offsetof({struct}, {name}) == {field[1]}")
            claims.append(f"sizeof({struct}::{name}) == {field[0].itemsize}")
    return claims


def test_the_dtypes_are_the_structs(needs_nvrtc: None) -> None:
    compile_claims(claims_of_structs())


def test_a_wrong_offset_would_be_seen(needs_nvrtc: None) -> None:
    with pytest.raises(KernelCompileError, match="position"):
        compile_claims(["__builtin_offsetof(SlotState, position) == 8"])


def test_a_state_holds_the_request() -> None:
    sampling = Sampling(
        temperature=0.7, top_k=9, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, logprobs=4,
    )  # fmt: skip
    state = slot_state(Admit(2, sampling, -1, 17, (5, 3, 5)))
    assert (state["seed"], state["max_new_tokens"], state["num_logprobs"]) == (2**64 - 1, 17, 4)
    assert (state["last_token"], state["position"], state["num_generated"], state["finished"]) == (-1, 0, 0, 0)
    assert state["stop_ids"][: state["num_stop_ids"]].tolist() == [3, 5]
    for name in ("temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert state[name] == np.float32(getattr(sampling, name))
    assert state["log_min_p"] == np.log(np.float32(0.1))


OTHER: dict[str, Any] = {"top_k": 3, "logprobs": 2, "logit_bias": ((4, 2.0),)}


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling)])
def test_a_state_holds_every_setting_of_the_sampling(name: str) -> None:
    changed = Sampling(**{name: OTHER.get(name, 0.5)})
    assert changed != Sampling()
    assert slot_state(Admit(0, changed, 0, 1, ())).tobytes() != slot_state(Admit(0, Sampling(), 0, 1, ())).tobytes()


def test_filters_that_are_off_and_nearly_off() -> None:
    off = slot_state(Admit(0, Sampling(), 0, 1, ()))
    assert (off["top_p"], off["log_min_p"], off["num_stop_ids"]) == (1, -np.inf, 0)
    assert slot_state(Admit(0, Sampling(top_p=1 - 1e-12), 0, 1, ()))["top_p"] < 1
    assert slot_state(Admit(0, Sampling(temperature=1e-38), 0, 1, ()))["temperature"] == 0, "greedy: nothing is divided"


def test_biases_stand_in_the_order_of_their_ids() -> None:
    state = slot_state(Admit(0, Sampling(logit_bias=((4, 2.0), (9, -1.5), (70, 1.0))), 0, 1, ()))
    count = state["num_logit_biases"]
    assert list(zip(state["biased_ids"][:count].tolist(), state["logit_biases"][:count].tolist(), strict=True)) == [
        (4, 2.0), (9, -1.5), (70, 1.0),
    ]  # fmt: skip
    full = Sampling(logit_bias=tuple((token, 1.0) for token in range(301)))
    with pytest.raises(RequestError, match="at most 300, got 301"):
        slot_state(Admit(0, full, 0, 1, ()))


def test_too_many_stop_ids_are_refused() -> None:
    slot_state(Admit(0, Sampling(), 0, 1, tuple(range(32)) * 2))
    with pytest.raises(RequestError, match="at most 32.*got 33"):
        slot_state(Admit(0, Sampling(), 0, 1, tuple(range(33))))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_unknown_tokens_never_reach_the_device(token: int) -> None:
    entry = np.zeros(command_bytes(CHUNK, PAGES), np.uint8)
    with pytest.raises(RequestError, match=f"0 to 63, got {token}"):
        write_step(entry, Prefill(0, (1, token), 0, True), VOCAB)
    with pytest.raises(RequestError, match=f"0 to 63, got {token}"):
        write_step(entry, Recall(0, (1, token)), VOCAB)
    assert not entry.any()


@pytest.mark.parametrize(("chunk", "pages"), [(1, 1), (8, 2048), (100, 3), (2048, 64)])
def test_an_entry_holds_the_largest_command(chunk: int, pages: int) -> None:
    size = command_bytes(chunk, pages)
    assert size % 64 == 0
    entry = np.zeros(size, np.uint8)
    write_step(entry, Prefill(3, (7,) * chunk, 5, True), VOCAB)
    write_slots(entry, ss.DECODE, range(ss.MAX_ROWS))
    write_step(entry, Recall(3, (7,) * chunk), VOCAB)
    write_step(entry, Admit(1, Sampling(), 0, 1, tuple(range(32)), tuple(range(pages))), VOCAB)


def test_a_block_table_follows_the_state() -> None:
    entry = np.zeros(command_bytes(CHUNK, PAGES), np.uint8)
    write_step(entry, Admit(1, Sampling(), 0, 1, (), (4, 2, 9)), VOCAB)
    header, state = ss.COMMAND.itemsize, ss.SLOT_STATE.itemsize
    assert entry[:header].view(ss.COMMAND)[0]["num_rows"] == 3
    assert entry[header + state :].view(np.int32)[:3].tolist() == [4, 2, 9]
    write_step(entry, Admit(1, Sampling(), 0, 1, ()), VOCAB)
    assert entry[:header].view(ss.COMMAND)[0]["num_rows"] == 0


def test_answers_are_told_apart_by_their_number() -> None:
    record = np.zeros(1, ss.RESULT_RECORD)[0]
    words, number = memoryview(record["words"]), 2**32 + 5
    assert answered_tokens(words, number, 1) is None
    record["words"][:2] = [5 << 32 | 9, 5 << 32 | ss.NO_TOKEN]
    assert answered_tokens(words, number, 2) == [9, ss.NO_TOKEN]
    assert answered_tokens(words, number, 3) is None


def test_tokens_belong_to_slots() -> None:
    """Each slot has the same number of words; words without a token are at the end of the slot's."""
    record = np.zeros(1, ss.RESULT_RECORD)[0]
    record["logprobs"]["logprob"][:3] = [-1, -2, -3]
    record["logprobs"]["num_top"][1] = 1
    record["logprobs"]["top_ids"][1, 0], record["logprobs"]["top_logprobs"][1, 0] = 4, -0.5
    none, with_logprobs = SlotResult(), TokenLogprobs(8, -2.0, ((4, -0.5),))
    assert step_result([9, ss.NO_TOKEN], record, (0, 0)).slots == (SlotResult((9,)), none)
    assert step_result([9, 8, ss.NO_TOKEN], record, (0, 1, 2)).slots == (
        SlotResult((9,)), SlotResult((8,), (with_logprobs,)), none,
    )  # fmt: skip
    assert step_result([9, 8, ss.NO_TOKEN], record, (0,)).slots == (SlotResult((9, 8)),)
    assert step_result([9, ss.NON_FINITE], record, (0, 0)).slots == (SlotResult((9,)), SlotResult(non_finite=True))
    assert step_result([9, ss.NON_FINITE, ss.NO_TOKEN], record, (0,)).slots == (SlotResult((9,), non_finite=True),)
    assert step_result([ss.NON_FINITE, ss.NO_TOKEN], record, (2,)).slots == (SlotResult(non_finite=True),)
    emitted = SlotResult((9, 8), (TokenLogprobs(9, -1.0), with_logprobs))
    assert step_result([9, 8, ss.NO_TOKEN], record, (1,)).slots == (emitted,)
    assert step_result([ss.NO_TOKEN], record, ()).slots == ()
    assert step_result([9, 8, 7, ss.NO_TOKEN, ss.NO_TOKEN, ss.NO_TOKEN], record, (0, 2, 1)).slots == (
        SlotResult((9, 8)), SlotResult((7,), (TokenLogprobs(7, -3.0),)), none,
    )  # fmt: skip
    assert step_result([9, ss.NON_FINITE, 7, 6], record, (0, 0)).slots == (
        SlotResult((9,), non_finite=True), SlotResult((7, 6)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "failure"), [(ss.NO_MASK, "late"), (ss.CUT_NODE, "cut"), (ss.NOTHING_ALLOWED, "nothing")]
)
def test_what_a_mask_has_to_do_with_ends_its_own_slot(code: int, failure: MaskFailure) -> None:
    record = np.zeros(1, ss.RESULT_RECORD)[0]
    ended = SlotResult(mask_failure=failure)
    assert step_result([9, code], record, (0, 0)).slots == (SlotResult((9,)), ended)
    assert step_result([code, ss.NO_TOKEN, 9, 8], record, (0, 0)).slots == (ended, SlotResult((9, 8)))
    assert step_result([9, code], record, (0,)).slots == (SlotResult((9,), mask_failure=failure),)
    assert step_result([code], record, (1,)).slots == (ended,)
