"""Keys and values in fp8 in the plans: bytes of pages, room for expanded ones, rings that find room twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpmrt.bench.work import decode_bytes
from cpmrt.config import EngineConfig, ModelConfig, TreeShape
from cpmrt.config.draft import DraftConfig
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.precompile import known_device, modules_of
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.draft import Draft
from cpmrt.opening import Blueprint

MODEL = ModelConfig.from_hf({
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 3,
    "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 65536,
})  # fmt: skip
SHARED_OF_SM = {80: 164, 87: 164, 90: 228, 100: 228, 86: 100, 89: 100, 120: 100}
"""KiB of shared memory per multiprocessor; a block takes one more than it asks for (CUDA C++ Programming Guide,
"Compute Capabilities")."""


LOOKUP = Blueprint(
    MODEL, EngineConfig(kv_dtype="fp8"), CudaTarget(known_device("sm_90")), tensor_specs(MODEL),
    Draft(DraftConfig.lookup(), (TreeShape.chain(5), TreeShape.chain(11))),
)  # fmt: skip


def plan(kv_dtype: str, max_context: int = 4096):
    engine, device = EngineConfig(kv_dtype=kv_dtype, max_sequences=3), known_device("sm_90")
    return Blueprint.of(MODEL, engine, CudaTarget(device)).plan(max_context)


def test_pages_take_half_and_one_sequence_of_a_layer_is_expanded():
    wide, narrow = plan("auto"), plan("fp8")
    pages = 3 * 64
    assert narrow.region("k_codes").shape == (3, pages, 2, 64, 128) == wide.region("k_pages").shape
    assert 2 * narrow.region("k_codes").nbytes == wide.region("k_pages").nbytes
    assert narrow.region("v_scales").shape == (3, pages, 2) and narrow.region("v_scales").nbytes == 4 * 3 * pages * 2
    assert narrow.region("expanded_k").shape == (64, 2, 64, 128)
    assert narrow.part_bytes["workspace"] <= wide.part_bytes["workspace"], "it shares the memory of the MLP"
    assert not {"k_codes", "k_scales", "expanded_k"} & {region.name for region in wide.regions}


def test_nodes_of_a_draft_have_codes_and_scales_of_their_own():
    drafted = LOOKUP.plan(4096)
    for part in "kv":
        nodes, scales = drafted.region(f"{part}_nodes"), drafted.region(f"{part}_node_scales")
        assert (nodes.shape, nodes.nbytes) == ((3, 12, 2, 128), 3 * 12 * 2 * 128) and scales.shape == (3, 12, 2)
    assert not any(region.name == "k_nodes" for region in plan("fp8").regions)


def test_a_long_context_needs_room_to_expand_it():
    assert plan("fp8", 65536).part_bytes["workspace"] > plan("auto", 65536).part_bytes["workspace"]
    assert plan("fp8", 65536).total_bytes < plan("auto", 65536).total_bytes


def test_the_bytes_of_a_step_are_those_that_are_held():
    wide, narrow = plan("auto").kv_bytes_per_token, plan("fp8").kv_bytes_per_token
    assert wide == 2 * narrow == 2 * 3 * 2 * 128 * 2
    steps = [decode_bytes(MODEL, 1000, 3, 2, kv_bytes=kv_bytes) for kv_bytes in (None, wide, narrow)]
    assert steps[0] == steps[1] == steps[2] + 3 * 1000 * narrow


@pytest.mark.parametrize("arch", SHARED_OF_SM)
@pytest.mark.parametrize("portable", [False, True])
def test_blocks_find_room_together(arch, portable):
    device = known_device(f"sm_{arch}")
    planned = replace(device, capability=86) if portable else device
    wide, narrow = (DecodePlan.of(MODEL.attention, planned, 65536, is_fp8=is_fp8) for is_fp8 in (False, True))
    blocks, one = narrow.num_splits * narrow.units, narrow.launch(1, narrow.constants)
    resident = SHARED_OF_SM[arch] * 1024 // (one.shared_bytes + 1024 + 512)
    assert one.shared_bytes <= device.shared_bytes_per_block and resident >= (2 if arch > 90 and arch != 120 else 1)
    assert wide.num_splits == narrow.num_splits and wide.launch(1, wide.constants).shared_bytes == one.shared_bytes
    assert blocks <= resident * device.num_sms
    assert narrow.constants.fp8 and not narrow.has_selected_kernel


@pytest.mark.parametrize("arch", ["sm_87", "sm_90"])
def test_modules_of_a_start(arch):
    modules = modules_of(
        Blueprint.of(MODEL, EngineConfig(kv_dtype="fp8"), CudaTarget(known_device(arch))), known_device(arch)
    )
    attention = [sizes for file, sizes in modules if file == "attention/decode_attention.cu"]
    assert attention and all(sizes["FP8"] for sizes in attention)
    assert ("attention/expand_pages.cu", {"HEAD_DIM": 128}) in modules
    assert [sizes for file, sizes in modules if file == "attention/rope_append.cu"] == [{"HEAD_DIM": 128, "FP8": 1}]


def test_modules_of_a_start_with_a_draft():
    modules = modules_of(LOOKUP, known_device("sm_90"))
    stored = [sizes for file, sizes in modules if file == "attention/rope_append.cu"]
    assert {"HEAD_DIM": 128, "FP8": 1, "TREE": 1} in stored and {"HEAD_DIM": 128, "FP8": 1} in stored
    assert ("attention/accept_nodes.cu", {"HEAD_DIM": 128}) in modules
