"""What the sources have to keep to: layers, who may include and name what, names, sizes, no exits,
no hidden globals, one version number. docs/design.md says why; this holds it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from slidedp import _slidedp

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
LAYERS = {
    "base": 0,
    "device": 1,
    "optim": 1,
    "model": 1,
    "cpu": 2,
    "cuda": 2,
    "state": 2,
    "route": 3,
    "plan": 3,
    "pipe": 4,
    "train": 5,
    "py": 6,
}
C_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".c", ".h", ".cu", ".cuh"})
HEADERS = [path for path in C_FILES if path.suffix == ".h"]
PYTHON = sorted(
    path
    for folder in ("slidedp", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py*")
    if path.suffix in {".py", ".pyi"}
)
WRITTEN = [
    *C_FILES,
    *PYTHON,
    *CSRC.glob("*/*.def"),
    *(ROOT / "tests" / "c").glob("*.[ch]"),
    *(ROOT / name for name in ("setup.py", "Makefile", ".ci/run", "tests/c/rules.mk")),
]
GENERATED = {"rope_golden.h"}
PRAGMA = re.compile(r"  # (?:type: ignore|noqa)\S*$")  # doesn't count, as with ruff

# Zeroed memory that the extension may write to outside of any object: what it is for.
GLOBALS = {
    "once": "pthread_once of the ISA",
    "chosen": "the ISA that it found",
    "blas": "functions of the BLAS, once a process",
    "lock": "of the BLAS; of NVIDIA's libraries; of the test hook of the heap",
    "libraries": "functions of NVIDIA's driver and cuBLASLt, once a process",
    "armed": "test hook: faults",
    "current": "test hook: faults",
    "passings": "test hook: faults",
    "countdown": "test hook: heap",
    "live": "test hook: heap",
    "PyArray_API": "NumPy",
    "completed": "compiler",
    "__cpu_model": "compiler",
    "__cpu_features2": "compiler",
}
# Initialised tables that the interpreter takes without const: those of csrc/py alone.
PY_TABLES = {"names", "methods", "engine_methods", "slots", "engine_slots", "definition"}
PY_TABLES |= {"slide_py_engine_spec", "__dso_handle", "__TMC_END__"}


def show(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_of(path: Path) -> str:
    """The text without comments, strings and character constants; lines stay where they are."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)

    def blank(found: re.Match[str]) -> str:
        return '""' if found[0][0] == '"' else " " + "\n" * found[0].count("\n")

    return token.sub(blank, path.read_text())


def includes(path: Path) -> list[tuple[str, bool]]:
    """(name, whether in angle brackets) of each #include."""
    found = re.findall(r'^\s*#\s*include\s*(<[^>]+>|"[^"]+")', path.read_text(), re.MULTILINE)
    return [(name[1:-1], name[0] == "<") for name in found]


def folder_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


# ---- layers ----


def test_folders_are_known() -> None:
    assert {folder_of(path) for path in C_FILES} <= set(LAYERS)
    assert len(C_FILES) > 50  # the globs still find them


@pytest.mark.parametrize("path", C_FILES, ids=show)
def test_includes(path: Path) -> None:
    """Own folder or a lower layer; foreign headers where they belong."""
    own = folder_of(path)
    for name, angle in includes(path):
        if angle:
            cuda = re.match(r"cu|nccl|nv|crt/", name)
            assert not cuda or own == "cuda", name
            assert name != "Python.h" or own == "py"
            assert not name.startswith("numpy/") or show(path) == "csrc/py/py_numpy.c"
            continue
        target = CSRC / name if "/" in name else path.parent / name
        if (show(path), name) == ("csrc/cuda/kernels/common.cuh", "emulate.h"):
            continue  # tests/emulator's, where CUDA C is compiled for a CPU
        assert target.is_file(), f'"{name}" is not a file of csrc/'
        other = folder_of(target)
        allowed = other == own or LAYERS[other] < LAYERS[own]
        assert allowed, f'{own} (layer {LAYERS[own]}) includes "{name}" (layer {LAYERS[other]})'


@pytest.mark.parametrize("path", C_FILES, ids=show)
def test_backends_are_named_in_one_place(path: Path) -> None:
    own = folder_of(path)
    if show(path) != "csrc/train/backends.c":
        named = set(re.findall(r"\bslide_(cpu|cuda)_\w+", code_of(path)))
        assert named <= {own}


# ---- names, sizes, words ----


@pytest.mark.parametrize("path", C_FILES, ids=show)
def test_library_code_neither_exits_nor_prints(path: Path) -> None:
    calls = r"(?<![\w.>])(?:_?exit|_Exit|quick_exit|abort|printf|vprintf|puts|putchar|assert)\s*\("
    text = re.sub(r"__attribute__\s*\(\(.*?\)\)", "", code_of(path), flags=re.DOTALL)
    assert re.findall(calls + r"|\bstdout\b", text) == []


@pytest.mark.parametrize("path", HEADERS, ids=show)
def test_headers_say_threads_and_blocks(path: Path) -> None:
    comment = re.match(r"/\*.*?\*/", path.read_text(), re.DOTALL)
    assert comment, "opens with a comment"
    assert "Threads:" in comment[0] and "Blocks:" in comment[0]


@pytest.mark.parametrize("path", [p for p in C_FILES if p.suffix == ".c"], ids=show)
def test_sources_open_with_a_comment(path: Path) -> None:
    comment = re.match(r"/\*.*?\*/", path.read_text(), re.DOTALL)
    assert comment and len(comment[0]) > 40


def definitions(text: str) -> list[str]:
    """The heads of functions that are defined in `text`: what stands before a { in column 0."""
    heads = []
    for match in re.finditer(r"^\{", text, re.MULTILINE):
        before = text[: match.start()].rstrip("\n")
        lines: list[str] = []
        for line in reversed(before.split("\n")):
            if not line.strip() or line.startswith("#") or line.rstrip().endswith((";", "}")):
                break
            lines.insert(0, line)
        heads.append(" ".join(lines))
    return heads


@pytest.mark.parametrize("path", C_FILES, ids=show)
def test_public_functions_have_the_prefix(path: Path) -> None:
    for head in definitions(code_of(path)):
        if re.search(r"\b(static|INLINE|ENTRY|__device__)\b", head) or "(" not in head:
            continue
        name = re.search(r"(\w+)\s*\(", re.sub(r"__attribute__\s*\(\(.*?\)\)", "", head))
        assert name, head
        macro = name[1].isupper()  # SLIDE_ISA_NAME(...) and PyMODINIT_FUNC
        assert macro or name[1].startswith(("slide_", "PyInit_")), head


def test_extension_exports_one_symbol_and_hides_no_state() -> None:
    """What the linker made: one name to see, and no writable global but those in the list."""
    if not shutil.which("nm") or not shutil.which("objdump"):
        pytest.skip("needs nm and objdump")
    exports = subprocess.run(
        ["nm", "-D", "--defined-only", _slidedp.__file__],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [line.split()[-1] for line in exports.splitlines()] == ["PyInit__slidedp"]
    table = subprocess.run(
        ["objdump", "-t", _slidedp.__file__], capture_output=True, text=True, check=True
    ).stdout
    if "no symbols" in table:
        pytest.skip("the extension is stripped")
    found: dict[str, set[str]] = {".bss": set(), ".data": set()}
    for line in table.splitlines():
        match = re.search(r" O (\.bss|\.data)\t\S+\s+(?:\.hidden )?(\w+)", line)
        if match:
            found[match[1]].add(match[2])
    assert found[".bss"] <= set(GLOBALS), "a writable global: see the rule in CONTRIBUTING.md"
    assert found[".data"] <= PY_TABLES, "a table that lacks const"
    assert "once" in found[".bss"]  # the pattern still reads objdump


@pytest.mark.parametrize("path", WRITTEN, ids=show)
def test_sizes(path: Path) -> None:
    if path.name in GENERATED:
        return
    lines = path.read_text().splitlines()
    assert len(lines) <= 900, "past 900 lines it is two files"
    wide = [n for n, line in enumerate(lines, 1) if len(PRAGMA.sub("", line)) > 100]
    assert wide == [], "lines of more than 100 columns"


# ---- the build ----


def test_flags_keep_the_bits() -> None:
    build = "".join(
        (ROOT / name).read_text()
        for name in ("csrc/isa.flags", "setup.py", "Makefile", "tests/c/rules.mk")
    )
    for word in ("-march=", "-mtune=", "-ffast-math", "-Ofast", "-funsafe", "-fassociative"):
        assert word not in build
    flags = dict(re.findall(r"^(\w+): *(.*)$", (CSRC / "isa.flags").read_text(), re.MULTILINE))
    assert "-ffp-contract=off" in flags["common"]
    for name in ("common", "hot", "base"):
        assert not re.search(r"(?:^| )-m\w", flags[name]), f"{name} is for every processor"


def test_version_is_in_one_place() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    files = [ROOT / "setup.py", ROOT / "Makefile", *C_FILES, *(ROOT / "slidedp").glob("*.py*")]
    assert [
        show(path) for path in files if re.search(rf"\b{re.escape(version)}\b", path.read_text())
    ] == []
    assert _slidedp.__version__ == version


def test_isa_folders_are_built() -> None:
    """setup.py and the rules of the C tests know every folder of csrc/."""
    setup = re.search(r"^FOLDERS = (.*?)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    rules = re.search(
        r"^C_FOLDERS := (.*?)$", (ROOT / "tests/c/rules.mk").read_text(), re.MULTILINE
    )
    assert setup and rules
    folders = set(re.findall(r"\w+", setup[1]))
    assert {folder_of(path) for path in C_FILES} - {"cuda"} <= folders <= set(LAYERS)
    assert set(rules[1].split()) == folders - {"py"}


# ---- Python ----


def imported(path: Path) -> set[str]:
    """Top packages that a file imports anywhere, also inside of functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "slidedp").glob("*.py")), ids=show)
def test_imports_of_the_package(path: Path) -> None:
    """No torch or transformers, no pickle, nothing that isn't declared."""
    names = imported(path)
    assert not names & {"torch", "transformers", "pickle", "marshal", "shelve", "dill"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=!~\[ ]", text)[0].lower() for text in project["dependencies"]}
    declared = {{"pyyaml": "yaml"}.get(name, name.replace("-", "_")) for name in declared}
    import sys

    foreign = names - set(sys.stdlib_module_names) - {"slidedp"}
    assert foreign <= declared, foreign - declared
