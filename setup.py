"""Builds the one extension, slidedp._slidedp, out of csrc/; everything else is in pyproject.toml.

The compiler flags are those of csrc/isa.flags, which the C tests (tests/c/rules.mk) read as well:
files named *_isa.c are compiled once an instruction set, all others once. setuptools compiles each
source once and with one set of flags, so the compiling is done here: two files at a time (or
SLIDE_BUILD_JOBS), and only what changed since the last build, headers included.

csrc/cuda is built where nvcc and the headers of CUDA, cuBLAS and cuDNN are found, for the GPUs of
SLIDE_CUDA_ARCHS ("80,90"; default: ARCHS); without them cuda_stub.c stands in, and says what was
missing. SLIDE_CUDA=0 asks for the stub, SLIDE_CUDA=1 makes it an error.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy
import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Without isolation nobody looks at build-system.requires; older ones read pyproject.toml wrong.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"setuptools 77 or newer builds slidedp, here is {setuptools.__version__}: "
        "pip install 'setuptools>=77', or build with isolation"
    )

ROOT = Path(__file__).resolve().parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
FOLDERS = "base", "device", "optim", "model", "cpu", "state", "plan", "route", "pipe", "train", "py"
# Compute capabilities with machine code in the wheel; newer ones start from the last one's PTX.
ARCHS = "80,86,89,90,100,120"
# Not setuptools' folder, which is a new one for each editable install: objects are used again.
OBJECTS = Path("build") / f"objects-{sys.implementation.cache_tag}-{platform.machine()}"
JOBS = int(os.environ.get("SLIDE_BUILD_JOBS", "2"))


# A source, what it becomes, and the command without both.
Command = tuple[str, Path, list[str]]


def sources(pattern: str) -> list[str]:
    """Files of csrc/, relative to this file as setuptools wants them, in a fixed order."""
    found = (path for folder in FOLDERS for path in (ROOT / "csrc" / folder).glob(pattern))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def read_flags() -> dict[str, list[str]]:
    """The lines `NAME: FLAGS` of csrc/isa.flags."""
    lines = (ROOT / "csrc" / "isa.flags").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.strip() and not line.startswith("#"))
    return {name: flags.split() for name, flags in pairs}


class Toolkit(NamedTuple):
    """What csrc/cuda is built with; `missing` says why it can't be, and is "" otherwise."""

    nvcc: str = ""
    includes: tuple[str, ...] = ()
    missing: str = ""


def find_toolkit() -> Toolkit:
    """nvcc of $CUDA_HOME, the PATH or pip; headers of $CUDA_HOME, nvcc's toolkit, pip's nvidia."""
    wanted = os.environ.get("SLIDE_CUDA", "")
    if wanted == "0":
        return Toolkit(missing="it was switched off with SLIDE_CUDA=0")
    pip = Path(sysconfig.get_path("purelib")) / "nvidia"
    homes = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    on_path = shutil.which("nvcc")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    homes += [Path("/usr/local/cuda"), pip / "cu13"]
    nvccs = [str(home / "bin" / "nvcc") for home in homes if (home / "bin" / "nvcc").is_file()]
    folders = [home / "include" for home in homes] + sorted(pip.glob("*/include"))
    found: list[str] = []
    missing = [] if on_path or nvccs else ["nvcc"]
    for header in ("cuda.h", "cublasLt.h", "cudnn.h"):
        folder = next((str(path) for path in folders if (path / header).is_file()), "")
        if folder:
            found.append(folder)
        else:
            missing.append(header)
    if missing and wanted == "1":
        raise SystemExit(f"SLIDE_CUDA=1, but {' and '.join(missing)} can't be found")
    if missing:
        return Toolkit(missing=f"{' and '.join(missing)} could not be found")
    return Toolkit(nvcc=on_path or nvccs[0], includes=tuple(dict.fromkeys(found)))


def cuda_files() -> list[str]:
    """Everything below csrc/cuda."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/cuda").rglob("*") if p.is_file())


def cuda_names() -> list[str]:
    """The kernel files, by csrc/cuda/images.def."""
    text = (ROOT / "csrc" / "cuda" / "images.def").read_text()
    return re.findall(r"^X\((\w+)\)", text, re.MULTILINE)


def cuda_archs() -> list[str]:
    """The flags of nvcc that name the GPUs."""
    archs = [arch.strip() for arch in os.environ.get("SLIDE_CUDA_ARCHS", ARCHS).split(",")]
    codes = [f"arch=compute_{arch},code=sm_{arch}" for arch in archs]
    codes.append(f"arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    return [f"-gencode={code}" for code in codes]


def cuda_work(toolkit: Toolkit, driver: list[str]) -> tuple[list[Command], list[Command]]:
    """The fatbins; and the objects that stand on them: the backend's, or the stub's."""
    common = [*driver, *read_flags()["common"], "-pthread", "-Icsrc", "-O2"]
    folder = OBJECTS / "csrc" / "cuda"
    if toolkit.missing:
        stub = f'-DSLIDE_CUDA_MISSING="{toolkit.missing}"'
        return [], [("csrc/cuda/cuda_stub.c", folder / "cuda_stub.o", [*common, stub])]
    # The vendors' headers are not ours to warn about.
    common += [flag for path in toolkit.includes for flag in ("-isystem", path)]
    nvcc = [toolkit.nvcc, "-std=c++17", "-O3", "-Icsrc", *cuda_archs(), "-fatbin"]
    fatbins: list[Command] = []
    objects: list[Command] = []
    for name in cuda_names():
        fatbin = folder / "kernels" / f"{name}.fatbin"
        fatbins.append((f"csrc/cuda/kernels/{name}.cu", fatbin, nvcc))
        flags = [f"-DSLIDE_IMAGE=slide_cuda_image_{name}", f'-DSLIDE_FATBIN="{fatbin}"']
        target = folder / "kernels" / f"{name}.o"
        objects.append(("csrc/cuda/cuda_image.c", target, [*common, *flags]))
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.c")):
        if source.stem not in ("cuda_stub", "cuda_image"):
            name = str(source.relative_to(ROOT))
            objects.append((name, folder / f"{source.stem}.o", common))
    return fatbins, objects


def plan(source: str) -> list[tuple[str, list[str]]]:
    """(object's name, flags) of each compilation of a source."""
    flags = read_flags()
    common = [*flags["common"], "-pthread", "-Icsrc"]
    stem = source.removesuffix(".c")
    if stem.endswith("_isa"):
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        return [
            (f"{stem}.{isa}.o", [*common, *flags["hot"], *flags[isa], f"-DSLIDE_ISA_SUFFIX={isa}"])
            for isa in (flags["isa"] if x86 else ["base"])
        ]
    common.append("-O2")
    if Path(source).parent.name == "py":
        common += [
            f'-DSLIDE_VERSION="{VERSION}"',
            "-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION",
            "-DNPY_TARGET_VERSION=NPY_2_0_API_VERSION",
            f"-I{numpy.get_include()}",
        ]
    return [(f"{stem}.o", common)]


def up_to_date(target: Path, command: str) -> bool:
    """Whether `target` came of the same command, and nothing that it was made of is newer."""
    record = target.with_suffix(f"{target.suffix}.cmd")
    depends = target.with_suffix(f"{target.suffix}.d")
    try:
        if record.read_text() != command:
            return False
        made = target.stat().st_mtime_ns
        names = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return all(Path(name).stat().st_mtime_ns < made for name in names)
    except (OSError, IndexError):
        return False


class BuildExt(build_ext):
    """Compiles each source of an extension by plan(), then links."""

    def build_extension(self, ext: Extension) -> None:
        os.chdir(ROOT)
        # CC and CFLAGS of this Python and of the environment; for C the driver is a command line.
        driver = list(self.compiler.compiler_so)
        includes = [f"-I{path}" for path in self.compiler.include_dirs]
        toolkit = find_toolkit()
        if toolkit.missing:
            print(f"without CUDA: {toolkit.missing}", flush=True)
        fatbins, cuda = cuda_work(toolkit, driver)
        work = [
            (source, OBJECTS / name, [*driver, *includes, *flags])
            for source in ext.sources
            for name, flags in plan(source)
        ]
        # The fatbins become part of objects, so they come first.
        self._compile_all([*fatbins, *work])
        self._compile_all(cuda)
        path = Path(self.get_ext_fullpath(ext.name))
        objects = [target for _, target, _ in [*work, *cuda]]
        record = OBJECTS / "linked"
        text = "\n".join(map(str, objects))
        if not self.force and path.exists() and record.exists() and record.read_text() == text:
            made = path.stat().st_mtime_ns
            if all(target.stat().st_mtime_ns < made for target in objects):
                return
        self.compiler.link_shared_object(
            [str(target) for target in objects],
            str(path),
            libraries=ext.libraries,
            extra_postargs=ext.extra_link_args,
            build_temp=str(OBJECTS),
        )
        record.write_text(text)

    def _compile_all(self, work: list[Command]) -> None:
        with ThreadPoolExecutor(max(1, JOBS)) as pool:
            errors = [error for error in pool.map(self._compile, work) if error]
        if errors:
            raise CompileError("\n".join(errors))

    def _compile(self, work: Command) -> str:
        """What went wrong, or nothing. A warning of the compiler is shown."""
        source, target, command = work
        depends = target.with_suffix(f"{target.suffix}.d")
        command = [*command, "-MMD", "-MF", str(depends)]
        if target.suffix == ".fatbin":
            command += [source, "-o", str(target)]
        else:
            command += ["-c", source, "-o", str(target)]
        text = shlex.join(command)
        if not self.force and up_to_date(target, text):
            return ""
        target.parent.mkdir(parents=True, exist_ok=True)
        record = target.with_suffix(f"{target.suffix}.cmd")
        record.unlink(missing_ok=True)
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            return f"{source}: {text}\n{result.stdout}{result.stderr}"
        record.write_text(text)
        print(f"cc {target.name}\n{result.stderr}", end="", flush=True)
        return ""


setup(
    ext_modules=[
        Extension(
            "slidedp._slidedp",
            sources=sources("*.c"),
            depends=[*sources("*.h"), *sources("*.def"), *cuda_files(), "csrc/isa.flags"],
            libraries=["m", "dl"],
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
