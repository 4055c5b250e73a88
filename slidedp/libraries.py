"""Where the libraries lie that pip installs beside us."""

import importlib.util
from pathlib import Path


def blas_path() -> str:
    """The scipy-openblas32 wheel's library; "" where it is not installed. The package itself is not
    imported."""
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        library = Path(folder) / "lib" / "libscipy_openblas.so"
        if library.is_file():
            return str(library)
    return ""


def nvidia_path() -> str:
    """The folder that pip's nvidia packages (cuBLAS, cuDNN, NCCL) share; "" without them."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if Path(folder).is_dir():
            return str(folder)
    return ""
