"""The whole check of a machine with a GPU: its tests, the sanitizer, the benchmark. Called by `tools/dev.py gpu`.

Runs from the source tree with this interpreter and the packages that it has: no network, no venv. Every stage has a
time limit and a log; the end is one table and an exit code, 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLKIT_BIN = Path("/usr/local/cuda/bin")
SHOWN_OF_A_FAILURE = 30
NO_SANITIZER = "compute-sanitizer is not installed"
MEMORY_FOR_8B = 22 << 30

# Test file -> a few of its tests, for the sanitizer: only these, as it makes them ten to a hundred times slower.
SANITIZED = {
    "test_accept.py": ("test_a_stop_token_ends_inside_the_path", "test_hidden_states_as_wide_as_a_model_has_them"),
    "test_activation.py": ("test_gates_of_every_size_stay_finite",),
    "test_bandwidth.py": ("test_every_word_is_read_once",),
    "test_carry.py": ("test_behind_a_cached_prefix_the_first_row_is_padding", "test_decode_steps_append_a_row_each"),
    "test_chain.py": ("test_a_chain_ends_where_there_is_no_more_room", "test_the_target_gets_the_chain"),
    "test_columns.py": ("test_columns_go_where_they_belong", "test_clear"),
    "test_combine.py": ("test_outputs_are_added_by_their_shares",),
    "test_decode_attention.py": ("test_padding_rows_become_zeros", "test_slots_may_share_pages"),
    "test_qkv_attention.py": ("test_against_the_ops", "test_padding_becomes_zeros_and_stores_nothing"),
    "test_decode_trees.py": ("test_bases_around_page_edges", "test_plain_rows_among_those_of_trees"),
    "test_draft_top_k.py": ("test_padding_and_the_map_of_a_cut_vocabulary",),
    "test_draft_tree.py": ("test_rows_follow_their_parents_hidden_states", "test_nodes_without_room_are_padding"),
    "test_embed.py": ("test_padding_rows_become_zero_and_read_nothing",),
    "test_experts.py": ("test_another_expert_is_noticed",),
    "test_experts_row.py": ("test_a_row_of_padding_has_no_experts_and_stays",),
    "test_ffn_row.py": ("test_to_padding_nothing_is_added",),
    "test_fp8_pages.py": ("test_an_empty_slot_expands_nothing", "test_a_row_does_not_depend_on_the_others"),
    "test_fp8_trees.py": ("test_padding_rows_become_zeros", "test_an_accepted_path_in_every_layer"),
    "test_gate.py": ("test_rows_are_the_oracles",),
    "test_gather.py": ("test_columns_in_another_order",),
    "test_gemm.py": ("test_dependent_launches_keep_the_order",),
    "test_group_pairs.py": ("test_pairs_are_sorted_by_expert",),
    "test_head_rows.py": ("test_rows_and_lengths",),
    "test_join.py": ("test_halves_are_the_oracles",),
    "test_row_layers.py": ("test_padding_and_a_product_behind_the_last_layer",),
    "test_row_products.py": ("test_fewer_blocks_that_have_more_tiles",),
    "test_latent_attention.py": (
        "test_padding_rows_become_zeros", "test_append_latent",
        "test_the_bits_of_a_chunk_do_not_depend_on_how_it_is_cut_nor_on_the_heads_at_once",
    ),  # fmt: skip
    "test_lightning_decode.py": ("test_a_sequence_that_has_ended_takes_nothing_up",),
    "test_lightning_prefill.py": ("test_an_empty_chunk_changes_nothing",),
    "test_linear.py": ("test_without_bias", "test_a_row_does_not_see_the_others"),
    "test_linear_packed.py": ("test_without_bias", "test_a_row_does_not_see_the_others"),
    "test_loader.py": ("test_values_beyond_float16_are_flagged", "test_a_streamed_checkpoint_equals_the_packed_one"),
    "test_lookup.py": ("test_no_match_no_room_and_a_finished_sequence",),
    "test_masked_sampling.py": ("test_tokens_are_the_definitions",),
    "test_masked_tree_sampling.py": ("test_a_tree_that_is_let_go_samples_anything",),
    "test_norm.py": ("test_rows_are_the_oracles",),
    "test_packed_gemm.py": (
        "test_a_chunk_is_activated_as_by_a_kernel_behind_it", "test_groups_of_rows_behind_a_chunk_stay_as_they_are",
    ),  # fmt: skip
    "test_prefill_attention.py": ("test_a_bucket_that_is_no_multiple_of_the_tile", "test_an_empty_slot_stores_nothing"),
    "test_prefill_selected_wgmma.py": ("test_rows_that_look_at_everything_are_left_to_dense_attention",),
    "test_repack.py": ("test_bfloat16_scales_and_no_zero_points_of_a_source",),
    "test_repack_blocks.py": ("test_a_scale_that_is_not_finite_is_flagged",),
    "test_rescore.py": ("test_few_tokens_are_rescored", "test_what_needs_all_logits_gets_them"),
    "test_residual.py": ("test_rows_are_the_oracles",),
    "test_rope_append.py": ("test_a_row_does_not_depend_on_the_others",),
    "test_round_weights.py": ("test_a_value_that_is_not_finite_is_flagged",),
    "test_route.py": ("test_padding_has_no_experts",),
    "test_sampling.py": ("test_the_state_follows_the_token", "test_padding_rows_leave_everything_alone"),
    "test_score_chunk.py": ("test_equal_scores_take_the_lower_blocks", "test_scores_that_overflow_and_vanish"),
    "test_screen_head.py": ("test_the_copy_and_its_bounds",),
    "test_several_trees.py": ("test_rows_that_wait_lie_side_by_side", "test_each_looks_up_in_its_own_text"),
    "test_sparse_attention.py": ("test_many_blocks",),
    "test_sparse_keys.py": ("test_rows_of_many_slots",),
    "test_sparse_selection.py": ("test_brute_force", "test_a_choice_is_the_same_bits_in_any_company"),
    "test_speculate.py": ("test_rows_as_wide_as_a_model_has_them", "test_after_catching_up_the_newest_row_stays"),
    "test_state.py": ("test_states_of_slots_and_snapshots",),
    "test_step.py": ("test_slots_bring_certain_tokens", "test_the_head_gets_the_last_row_of_the_chunk"),
    "test_tree_attention.py": ("test_rows_of_several_trees_and_padding",),
    "test_tree_sampling.py": ("test_a_node_samples_what_plain_decoding_samples",),
}
NOT_SANITIZED = ("step/loop.cu",)
"""Kernels that the sanitizer does not check. This one runs only in WHILE nodes: under memcheck and initcheck these end
in an illegal address that names no kernel, under racecheck in a crash."""
PORTABLE_TESTS = tuple(
    f"tests/executors/test_cuda_{what}.py" for what in ("golden", "executor", "memory", "speculation")
)
SANITIZED_MODELS = ("llama_bias-float16", "qwen3-bfloat16", "minicpm-bfloat16")
"""Models of test_cuda_golden.py that run under memcheck, each kernel in its place. racecheck does not finish with them,
and initcheck would report reads of whole pages, whose unwritten rows are masked afterwards."""
CASES_SMALL = ("--shape", "minicpm4-0.5b", "--case", "1024:256", "--max-context", "4096", "--startup")
CASES_LARGE = ("--shape", "minicpm4-8b", "--case", "1024:128", "--case", "8192:64", "--case", "32768:64")
CASES_TOGETHER = ("--shape", "minicpm4-8b", "--case", "1024:128:8", "--max-context", "4096")


@dataclass(frozen=True)
class Verdict:
    """The judgement of a stage by its log: whether it is good, and the numbers to show in the table."""

    is_good: bool
    numbers: str


@dataclass(frozen=True)
class Stage:
    """One command of the check. `judge` judges its log. A stage without a command cannot run here; `note` says why."""

    name: str
    command: tuple[str, ...]
    limit_s: int = 0
    judge: Callable[[str], Verdict] = lambda log: Verdict(True, "")
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a stage: a row of the table."""

    stage: str
    outcome: str
    seconds: float
    numbers: str
    failed: bool


def judge_pytest(log: str) -> Verdict:
    """Judge by pytest's closing line: good if tests passed and none failed, had errors or was skipped."""
    counts = re.findall(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", log, re.MULTILINE)
    if not counts:
        return Verdict(False, "no summary")
    found = dict(reversed(item.split(" ", 1)) for item in counts[-1].split(", "))
    is_good = "passed" in found and not found.keys() & {"failed", "error", "errors", "skipped"}
    return Verdict(is_good, counts[-1])


def judge_sanitizer(log: str) -> Verdict:
    """Judge by the closing lines of compute-sanitizer and of pytest: good if both report no errors."""
    tests = judge_pytest(log)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: ((\d+) (?:errors?|hazards?)[^\n]*)", log)
    if not summary:
        return Verdict(False, f"no summary of the sanitizer; {tests.numbers}")
    clean = all(int(count) == 0 for _, count in summary)
    return Verdict(clean and tests.is_good, f"{summary[-1][0]}; {tests.numbers}")


def bench_numbers(record: dict[str, object]) -> str:
    """Return the most important numbers of the benchmark's JSON as one line of text."""
    parts = []
    for case in record["cases"]:  # type: ignore[attr-defined]
        result, share = case["measurement"], case["read_share"]
        shape = ":".join(str(result["case"][name]) for name in ("prompt_tokens", "new_tokens", "sequences"))
        of_read = "" if share is None else f" ({share:.0%} of read)"
        parts.append(
            f"{shape} prefill {result['prefill_tokens_per_s']:,.0f}, decode {result['decode_tokens_per_s']:,.1f} tok/s"
            f"{of_read}, host {result['host_us_per_step']:.1f} us"
        )
    startup = record["process_to_first_token_s"]
    return "; ".join(parts) + (f"; first token after {startup:.2f} s" if startup is not None else "")


def judge_bench(path: Path) -> Callable[[str], Verdict]:
    """Return a judge of the benchmark, which is good if it has written its JSON to `path`."""

    def judge(log: str) -> Verdict:
        try:
            return Verdict(True, bench_numbers(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Verdict(False, f"no result: {error}")

    return judge


def stages(logs: Path, *, quick: bool, gpu_bytes: int, sanitizer: str | None) -> list[Stage]:
    """Return the stages to run, in order. `sanitizer` is the path of compute-sanitizer, None if it is not installed."""
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    limit = 300 if quick else 1200
    side_by_side = (sys.executable, "tools/gpu_tests.py", "-m", "gpu and not all" if quick else "gpu")
    found = [Stage("GPU tests", (*side_by_side, *gpu_test_files()), limit, judge_pytest)]
    portable = ("env", "CPMRT_PORTABLE=1", *side_by_side, *PORTABLE_TESTS)
    found.append(Stage("path of older GPUs", portable, limit, judge_pytest))
    selection = [f"tests/kernels/{file}::{test}" for file, tests in SANITIZED.items() for test in tests]
    models = [f"tests/executors/test_cuda_golden.py::test_a_model_of_transformers[{m}]" for m in SANITIZED_MODELS]
    models.append("tests/executors/test_cuda_golden.py::test_a_model_on_the_path_of_older_gpus[minicpm-bfloat16]")
    for tool, tests in (("memcheck", selection + models), ("racecheck", selection), ("initcheck", selection)):
        command = (sanitizer or "", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "99")
        stage = Stage(tool, (*command, *pytest, "-m", "gpu", *tests), 120 if quick else 600, judge_sanitizer)
        found.append(stage if sanitizer else Stage(tool, (), note=NO_SANITIZER))
    planted = (sys.executable, "tools/planted_faults.py", sanitizer or "")
    found.append(Stage("planted faults", planted, 120) if sanitizer else Stage("planted faults", (), note=NO_SANITIZER))
    found.append(bench_stage("benchmark 0.5B", logs, CASES_SMALL))
    if not quick and gpu_bytes < MEMORY_FOR_8B:
        found.append(Stage("benchmark 8B", (), note=f"needs a GPU with {MEMORY_FOR_8B >> 30} GiB"))
    elif not quick:
        found.append(bench_stage("benchmark 8B", logs, (*CASES_LARGE, "--max-context", "33792")))
        found.append(bench_stage("benchmark 8B, 8 together", logs, CASES_TOGETHER))
    return found


def bench_stage(name: str, logs: Path, options: Sequence[str]) -> Stage:
    """Return a stage that runs `cpmrt bench`, with its JSON beside the log. Removes an old JSON."""
    path = logs / f"{file_name(name)}.json"
    path.unlink(missing_ok=True)
    command = (sys.executable, "-m", "cpmrt", "bench", "--executor", "cuda", "--json", str(path), *options)
    return Stage(name, command, 300, judge_bench(path))


def gpu_test_files() -> list[str]:
    """Return the files that have tests marked `gpu`, so that pytest need not import the others."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


def run_stage(stage: Stage, logs: Path) -> Outcome:
    """Run the command of a stage, with its output in a log. At the end all processes that it has started are killed."""
    if not stage.command:
        return Outcome(stage.name, "NOT RUN", 0.0, stage.note, failed=False)
    path, begun = logs / f"{file_name(stage.name)}.log", time.monotonic()
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": python_path, "CPMRT_REQUIRE_GPU": "1", "HF_HUB_OFFLINE": "1"}
    with path.open("wb") as log:
        process = subprocess.Popen(
            stage.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(stage.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    seconds, verdict = time.monotonic() - begun, stage.judge(path.read_text(encoding="utf-8", errors="replace"))
    if code is None:
        return Outcome(stage.name, f"TIMED OUT ({stage.limit_s} s)", seconds, verdict.numbers, failed=True)
    if code or not verdict.is_good:
        return Outcome(stage.name, f"FAILED (exit code {code})", seconds, verdict.numbers, failed=True)
    return Outcome(stage.name, "ok", seconds, verdict.numbers, failed=False)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill all remaining processes of the process's group, and wait for the process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes of all stages in aligned columns."""
    rows = [("stage", "outcome", "seconds", "numbers")]
    rows += [(row.stage, row.outcome, f"{row.seconds:.1f}", row.numbers) for row in outcomes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def file_name(stage: str) -> str:
    """Return a stage's name as a file name, without a suffix."""
    return re.sub(r"[^a-z0-9.]+", "-", stage.lower())


def gpu_bytes() -> int:
    """Return the bytes of memory of the first GPU, 0 if the driver finds none."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    if libcuda.cuInit(0) or libcuda.cuDeviceGet(ctypes.byref(device), 0):
        return 0
    return size.value if libcuda.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0 else 0


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, from PATH or the CUDA toolkit; None if it is not installed."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(TOOLKIT_BIN))


def run_stages(found: Sequence[Stage], logs: Path) -> int:
    """Run every stage even if one fails. Return 1 if any failed."""
    outcomes = []
    for stage in found:
        print(f"[{stage.name}] ...", flush=True)
        outcome = run_stage(stage, logs)
        outcomes.append(outcome)
        print(f"[{stage.name}] {outcome.outcome}, {outcome.seconds:.1f} s  {outcome.numbers}", flush=True)
        if outcome.failed:
            tail = (logs / f"{file_name(stage.name)}.log").read_text(encoding="utf-8", errors="replace").splitlines()
            print("\n".join(f"    {line}" for line in tail[-SHOWN_OF_A_FAILURE:]), flush=True)
    print(f"\n{table(outcomes)}\nlogs: {logs}", flush=True)
    return int(any(outcome.failed for outcome in outcomes))


def main(arguments: Sequence[str]) -> int:
    """Parse the options and run the stages. Return the exit code."""
    parser = argparse.ArgumentParser(prog="tools/dev.py gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only tests of the first tier, and the 0.5B shape")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gpu", metavar="DIR", help="default: build/gpu")
    args = parser.parse_args(arguments)
    memory = gpu_bytes()
    if not memory:
        print("tools/dev.py: gpu needs an NVIDIA GPU with a working driver; see nvidia-smi", file=sys.stderr)
        return 1
    logs = args.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    return run_stages(stages(logs, quick=args.quick, gpu_bytes=memory, sanitizer=find_sanitizer()), logs)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
