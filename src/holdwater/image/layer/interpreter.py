"""Find and copy the running Python: its program, its standard library, its identity.

`linking.py` copies the shared libraries that it needs, down to the C library.
"""

from __future__ import annotations

import os
import platform
import shutil
import ssl
import sys
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

from ...core.errors import BadInput
from ...core.records import Record
from .elf import read_elf
from .thread import CancelCheck

# Directories and files of the standard library that no agent needs.
LEFT_OUT = (
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "__pycache__"),
    *("site-packages", "dist-packages", "config-*"),
    *("_tkinter.*", "_test*", "_ctypes_test*", "_xx*", "xxlimited*", "*.a", "*.exe"),
)
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",
)
SITE_CUSTOMIZE = """\
import os, site
site.addsitedir(os.path.join(os.path.dirname(__file__), "site-packages"))
"""


class PythonInterpreter(Record, frozen=True):
    """A Python on this machine."""

    executable: Path
    stdlib: Path
    loader: Path  # the dynamic loader, which starts it and finds its libraries
    identity: str

    @property
    def folder(self) -> str:
        """The standard library's path, relative to the installation prefix."""
        return f"{sys.platlibdir}/{self.stdlib.name}"


def find_interpreter() -> PythonInterpreter:
    """Return the running interpreter, or the one that its virtual environment was created from."""
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    elf = read_elf(executable)
    if elf is None or not elf.loader:
        raise BadInput(
            f"this Python cannot be copied into a layer: `{executable}` is not a dynamic ELF program"
        )
    parts = (sys.version, sys.implementation.cache_tag, sysconfig.get_platform(), *platform.libc_ver())
    return PythonInterpreter(
        executable=executable,
        stdlib=Path(sysconfig.get_path("stdlib")),
        loader=Path(elf.loader),
        identity=" ".join([*map(str, parts), ssl.OPENSSL_VERSION]),
    )


def copy_interpreter(interpreter: PythonInterpreter, tree: Path, check: CancelCheck) -> None:
    """Copy the program and the standard library, without files specific to this machine. Blocks."""
    (tree / "bin").mkdir(parents=True)
    name = f"python{_version()}"
    shutil.copyfile(interpreter.executable, tree / "bin" / name)
    (tree / "bin" / name).chmod(0o755)
    for other in ("python", "python3"):
        (tree / "bin" / other).symlink_to(name)

    def left_out(directory: str, names: list[str]) -> list[str]:
        check()
        return [
            n for n in names if any(fnmatch(n, pattern) for pattern in LEFT_OUT) or _dangles(directory, n)
        ]

    library = tree / interpreter.folder
    shutil.copytree(interpreter.stdlib, library, ignore=left_out, copy_function=shutil.copyfile)
    for extension in library.glob("lib-dynload/*.so"):
        extension.chmod(0o755)
    if "deb_system" in sysconfig.get_scheme_names():
        # Debian's Python searches for packages only in Debian's directories.
        (library / "sitecustomize.py").write_text(SITE_CUSTOMIZE)


def find_authorities(library: Path) -> Path:
    """Return the CA certificates to ship: those of the agent's own `certifi`, or of this machine."""
    own = library / "site-packages/certifi/cacert.pem"
    found = own if own.is_file() else find_machine_bundle()
    if found is None:
        hint = "let the agent depend on `certifi`, or install `ca-certificates`"
        raise BadInput("no CA certificates found to ship with the agent", hint)
    return found


def find_machine_bundle() -> Path | None:
    return next((path for path in map(Path, BUNDLES) if path.is_file()), None)


def _dangles(directory: str, name: str) -> bool:
    return not os.path.exists(f"{directory}/{name}")  # noqa: PTH110


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
