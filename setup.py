"""Builds the one extension, slidedp._slidedp, out of csrc/; everything else is in pyproject.toml.

The compiler flags are those of csrc/isa.flags, which the C tests (tests/c/rules.mk) read as well:
files named *_isa.c are compiled once an instruction set, all others once. setuptools compiles each
source once and with one set of flags, so the compiling is done here: two files at a time (or
SLIDE_BUILD_JOBS), and only what changed since the last build, headers included.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
# csrc/cuda is not here: it is built by nvcc, where there is one.
FOLDERS = "base", "device", "optim", "model", "cpu", "state", "plan", "route", "pipe", "train", "py"
# Not setuptools' folder, which is a new one for each editable install: objects are used again.
OBJECTS = Path("build") / f"objects-{sys.implementation.cache_tag}-{platform.machine()}"
JOBS = int(os.environ.get("SLIDE_BUILD_JOBS", "2"))


def sources(pattern: str) -> list[str]:
    """Files of csrc/, relative to this file as setuptools wants them, in a fixed order."""
    found = (path for folder in FOLDERS for path in (ROOT / "csrc" / folder).glob(pattern))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def read_flags() -> dict[str, list[str]]:
    """The lines `NAME: FLAGS` of csrc/isa.flags."""
    lines = (ROOT / "csrc" / "isa.flags").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.strip() and not line.startswith("#"))
    return {name: flags.split() for name, flags in pairs}


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
    record = target.with_suffix(".cmd")
    depends = target.with_suffix(".d")
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
        work = [
            (source, OBJECTS / name, [*driver, *includes, *flags])
            for source in ext.sources
            for name, flags in plan(source)
        ]
        with ThreadPoolExecutor(max(1, JOBS)) as pool:
            errors = [error for error in pool.map(self._compile, work) if error]
        if errors:
            raise CompileError("\n".join(errors))
        path = Path(self.get_ext_fullpath(ext.name))
        objects = [target for _, target, _ in work]
        if not self.force and path.exists():
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

    def _compile(self, work: tuple[str, Path, list[str]]) -> str:
        """What went wrong, or nothing. A warning of the compiler is shown."""
        source, target, command = work
        depends = target.with_suffix(".d")
        command = [*command, "-MMD", "-MF", str(depends), "-c", source, "-o", str(target)]
        text = shlex.join(command)
        if not self.force and up_to_date(target, text):
            return ""
        target.parent.mkdir(parents=True, exist_ok=True)
        record = target.with_suffix(".cmd")
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
            depends=[*sources("*.h"), *sources("*.def"), "csrc/isa.flags"],
            libraries=["m", "dl"],
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
