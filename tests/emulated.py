"""The CUDA backend without a GPU: csrc/cuda/kernels compiled for this CPU, and a driver and a
cuBLASLt that stand in for NVIDIA's (tests/emulator/). `library()` builds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "tests" / "emulator"
BUILD = ROOT / "build" / "emulator"
FLAGS = ["-std=c++17", "-O2", "-g", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-DSLIDE_EMULATE"]


def _headers() -> list[Path] | None:
    pip = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    folders += sorted(pip.glob("*/include"))
    found = [
        next((folder for folder in folders if (folder / name).is_file()), None)
        for name in ("cuda.h", "cublasLt.h")
    ]
    return None if None in found else [folder for folder in found if folder]


def why_not() -> str:
    """Why the emulator can't be built here; "": it can."""
    if not shutil.which("g++"):
        return "needs g++"
    return "" if _headers() else "needs the headers of CUDA and cuBLAS"


def _newest(path: Path, target: Path) -> bool:
    """Whether `target` is newer than everything that `path` was made of."""
    depends = target.with_suffix(".d")
    if not target.exists() or not depends.exists():
        return False
    names = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = target.stat().st_mtime_ns
    return all(Path(n).exists() and Path(n).stat().st_mtime_ns < made for n in [*names, str(path)])


def _compile(source: Path) -> Path:
    target = BUILD / f"{source.name}.o"
    if _newest(source, target):
        return target
    includes = ["-I", str(ROOT / "csrc"), "-I", str(SOURCES)]
    includes += [flag for folder in _headers() or () for flag in ("-isystem", str(folder))]
    command = ["g++", *FLAGS, *includes, "-MMD", "-MF", str(target.with_suffix(".d"))]
    subprocess.run([*command, "-x", "c++", "-c", str(source), "-o", str(target)], check=True)
    return target


def library() -> Path:
    """Builds what has changed; the path of the one library that is both."""
    BUILD.mkdir(parents=True, exist_ok=True)
    sources = [*SOURCES.glob("*.cpp"), *(ROOT / "csrc" / "cuda" / "kernels").glob("*.cu")]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(_compile, sorted(sources)))
    path = BUILD / "libfake_cuda.so"
    if not path.exists() or any(o.stat().st_mtime_ns > path.stat().st_mtime_ns for o in objects):
        fresh = path.with_suffix(f".{os.getpid()}")
        subprocess.run(
            ["g++", "-shared", "-o", str(fresh), *map(str, objects), "-pthread"], check=True
        )
        fresh.replace(path)
    return path


def environment() -> dict[str, str]:
    """What makes the backend find it. Set before the first use of CUDA in a process."""
    path = str(library())
    return {
        "SLIDE_CUDA_DRIVER": path,
        "SLIDE_CUBLASLT": path,
        "SLIDE_ATTENTION": "own",
        "SLIDE_CACHE": "0",
    }
