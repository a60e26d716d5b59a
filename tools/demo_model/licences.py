"""Decides from a distribution's metadata whether its text may be trained on.

Only a package that states a permissive licence is used. A licence expression counts before the trove
classifiers, these before the free `License` field; what cannot be read is treated as unknown and skipped.
"""

from __future__ import annotations

import re
from email.message import Message

PERMISSIVE_IDS = frozenset(
    {
        "0bsd", "apache-2.0", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cnri-python", "hpnd", "isc", "mit",
        "mit-0", "mit-cmu", "psf-2.0", "python-2.0", "zlib", "llvm-exception",
    }
)  # fmt: skip

PERMISSIVE_CLASSIFIERS = frozenset(
    {
        "Apache Software License",
        "BSD License",
        "CMU License (MIT-CMU)",
        "Historical Permission Notice and Disclaimer (HPND)",
        "ISC License (ISCL)",
        "MIT License",
        "MIT No Attribution License (MIT-0)",
        "Python Software Foundation License",
    }
)

PERMISSIVE_NAMES = re.compile(
    r"(the )?("
    r"apache([ -]software)?([ -]license)?,?( version)?[ -]?v?2(\.0)?( license)?|apache"
    r"|(new |modified |simplified |[23][ -]clause )?bsd([ -][23][ -]clause)?( license)?"
    r"|mit( license)?|isc( license)?|psf(-2\.0| license)?|hpnd|python-2\.0"
    r")",
    re.IGNORECASE,
)

RESTRICTED_TEXT = re.compile(
    r"\b[AL]?GPL(v?[23]|-[23])|General Public License|Mozilla Public License|\bMPL-2|Creative Commons"
    r"|CC[ -]BY|proprietary|strictly prohibited",
    re.IGNORECASE,
)
SPDX_TAG = re.compile(r"SPDX-License-Identifier:\s*([^\n*#\"']+)")


def permissive_licence(metadata: Message) -> str | None:
    """The licence as the package states it, or None when it is not known to be permissive."""
    expression = metadata.get("License-Expression")
    if expression:
        return expression if expression_is_permissive(expression) else None
    classifiers = [
        line.split(" :: ")[-1]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::") and not line.endswith(":: OSI Approved")
    ]
    if classifiers:
        return " / ".join(classifiers) if PERMISSIVE_CLASSIFIERS.issuperset(classifiers) else None
    stated = (metadata.get("License") or "").strip()
    return stated if PERMISSIVE_NAMES.fullmatch(stated) else None


def expression_is_permissive(expression: str) -> bool:
    """Whether an SPDX expression leaves only permissive terms: every AND part, one of each OR part."""
    terms = re.split(r"\bAND\b|\bWITH\b", expression.replace("(", " ").replace(")", " "))
    return all(
        any(choice.strip().lower() in PERMISSIVE_IDS for choice in term.split(" OR ")) for term in terms
    )


def text_is_permissive(text: str) -> bool:
    """Whether a single file carries no notice that contradicts its package's permissive licence."""
    head = text[:6000]
    tag = SPDX_TAG.search(head)
    if tag and not expression_is_permissive(tag.group(1).strip()):
        return False
    return RESTRICTED_TEXT.search(head) is None
