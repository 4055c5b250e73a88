"""The loops that are compiled once an instruction set: base has no AVX instruction, the others do.

The files are compiled here with the flags of csrc/isa.flags, as the build does it, and the objects
read with objdump.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SOURCES = sorted(CSRC.glob("*/*_isa.c"))
LINES = (CSRC / "isa.flags").read_text().splitlines()
FLAGS = {
    name: flags.split()
    for name, flags in (line.split(":", 1) for line in LINES if line and not line.startswith("#"))
}

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("cc") or not shutil.which("objdump"),
    reason="needs x86-64, a C compiler and objdump",
)


def disassemble(source: Path, isa: str, folder: Path) -> str:
    target = folder / f"{source.parent.name}_{source.stem}_{isa}.o"
    subprocess.run(
        [
            "cc",
            *FLAGS["common"],
            *FLAGS["hot"],
            *FLAGS[isa],
            f"-DSLIDE_ISA_SUFFIX={isa}",
            f"-I{CSRC}",
            "-c",
            str(source),
            "-o",
            str(target),
        ],
        check=True,
    )
    return subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(target)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_sources_are_found() -> None:
    assert {source.name for source in SOURCES} >= {"adamw_isa.c", "vec_isa.c"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_base_has_no_avx(source: Path, tmp_path: Path) -> None:
    text = disassemble(source, "base", tmp_path)
    assert "%xmm" in text
    assert not re.findall(r"^.*(?:%[yz]mm|%k[0-7]\b|:\tv[a-z]+\S*\s+[^\n]*%xmm).*$", text, re.M)


@pytest.mark.parametrize(("isa", "register"), [("base", "xmm"), ("avx2", "ymm"), ("avx512", "zmm")])
def test_adamw_is_vectorised(isa: str, register: str, tmp_path: Path) -> None:
    """Square root and division work on whole vectors, correctly rounded, and never one by one."""
    text = disassemble(CSRC / "optim" / "adamw_isa.c", isa, tmp_path)
    for name in ("sqrtps", "divps"):
        assert re.search(rf"\bv?{name}\b.*%{register}", text)
    assert not re.search(r"\bv?(sqrtss|divss|rsqrt\w*|rcp\w*)\b", text)


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_optim_has_no_contraction(isa: str, tmp_path: Path) -> None:
    for name in ("adamw_isa.c", "vec_isa.c"):
        assert not re.search(r"\bvfn?m(add|sub)", disassemble(CSRC / "optim" / name, isa, tmp_path))
