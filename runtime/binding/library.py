"""Finds and loads the native library."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from ctypes import c_char_p, c_int32, c_uint32
from pathlib import Path

from llmc.distribution import NAME
from llmc.runtime.binding.abi import ABI_VERSION, STATUS_FUNCTIONS, VOID_FUNCTIONS


def library_candidates() -> list[Path]:
    """Places of libllmc.so; an editable install keeps it in site-packages, away from the sources."""
    override = os.environ.get("LLMC_LIBRARY")
    if override:
        return [Path(override)]
    folders = [Path(__file__).parent.parent]
    try:
        import llmc.runtime

        folders += [Path(entry) for entry in llmc.runtime.__path__]
    except ImportError:
        pass
    folders += [Path(sysconfig.get_path(key)) / "llmc" / "runtime" for key in ("platlib", "purelib")]
    return [folder / "libllmc.so" for folder in dict.fromkeys(folders)]


def load_library() -> ctypes.CDLL:
    """Loads libllmc.so and declares its functions. LLMC_LIBRARY overrides the path."""
    candidates = library_candidates()
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        places = ", ".join(str(candidate) for candidate in candidates)
        raise ImportError(f"libllmc.so is at none of {places}; install {NAME}, or set LLMC_LIBRARY to the library")
    try:
        library = ctypes.CDLL(str(path))
        library.llmc_abi_version.restype = c_uint32
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"{path} is not the library of llmc ({error}); reinstall {NAME}, or unset LLMC_LIBRARY"
        ) from None
    library.llmc_version.restype = c_char_p
    library.llmc_machine_get_isa_level.restype = c_uint32
    if (version := library.llmc_abi_version()) != ABI_VERSION:
        raise ImportError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}; reinstall {NAME}")
    for names, result in ((STATUS_FUNCTIONS, c_int32), (VOID_FUNCTIONS, None)):
        for name, arguments in names.items():
            if not hasattr(library, name):
                raise ImportError(f"{path} has no function {name}; reinstall {NAME}")
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    return library
