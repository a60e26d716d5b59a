"""Check this machine: what cpmrt finds, what is missing, and the command that mends it.

The exit code is 0 if cpmrt can run here at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from cpmrt.cli import gpu_probes, host_probes
from cpmrt.cli.host_probes import Finding, Status
from cpmrt.cli.output import complain, printable, write, write_json, write_table


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print every finding. The exit code is 1 if one of them keeps cpmrt from running."""
    findings = list(_findings())
    can_run = all(finding.status is not Status.BROKEN for finding in findings)
    if args.json:
        rows = [{**asdict(finding), "status": finding.status.value} for finding in findings]
        write_json({"can_run": can_run, "findings": rows})
        return 0 if can_run else 1
    write_table([(f.subject, f.status.value, f.found) for f in findings], ("what", "state", "found"))
    unused = [finding for finding in findings if finding.status is Status.UNUSED]
    _write_fixes("to mend", [finding for finding in findings if finding not in unused])
    _write_fixes("to use what is unused here", unused)
    if not can_run:
        complain("cpmrt: error: cpmrt cannot run here; mend what is broken")
    return 0 if can_run else 1


def _write_fixes(title: str, findings: list[Finding]) -> None:
    fixes = [f"  {printable(finding.subject)}: {printable(finding.fix)}\n" for finding in findings if finding.fix]
    if fixes:
        write(f"\n{title}:\n{''.join(fixes)}")


def _findings() -> Iterator[Finding]:
    yield from host_probes.versions()
    yield from host_probes.required_packages()
    yield from host_probes.optional_packages()
    driver = gpu_probes.driver()
    yield from driver.findings
    yield gpu_probes.nvml(driver)
    yield from gpu_probes.cuda_wheels(driver)
    yield gpu_probes.nvrtc(driver)
    yield host_probes.cache_folder()
    yield host_probes.kernel_sources()
    yield host_probes.compiled_kernels()
    yield host_probes.bundled_model()
    yield host_probes.executor()
