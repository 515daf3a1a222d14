"""Builds the native core, and gives the package its long description.

That is README.md, with the paths of files in the place of links to them. All else is in pyproject.toml. Once the
repository has a URL, links and picture can lead there.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
NATIVE = Path("src", "weightcast", "native")
COMPILER = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
WANTED = os.environ.get("WEIGHTCAST_CC", "")
IS_BY_ZIG = WANTED == "ziglang" or (WANTED == "auto" and shutil.which(COMPILER) is None)
"""By the compiler of the wheel `ziglang`; `auto`: if there is none here."""
# A free-threaded Python does not load what was built for several versions.
IS_LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
NO_COMPILER = (
    f"weightcast's native core is written in C, and there is no C compiler: {COMPILER!r} is not on PATH. Install one "
    "(Debian and Ubuntu: apt install gcc), or let pip take one from the package index for this build, a download of "
    "some 100 MB: WEIGHTCAST_CC=ziglang pip install ."
)


class BuildCore(build_ext):
    """Compiles with the compiler that is here, or with ziglang's. No package is made without the core."""

    def build_extensions(self) -> None:
        if IS_BY_ZIG:
            target = f"{platform.machine()}-linux-{'gnu.2.28' if platform.libc_ver()[0] == 'glibc' else 'musl'}"
            zig = [sys.executable, "-m", "ziglang", "cc", "-target", target]
            self.compiler.set_executables(compiler_so=[*zig, "-fPIC"], linker_so=[*zig, "-shared"])
        elif shutil.which(COMPILER) is None:
            raise SystemExit(NO_COMPILER)
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        """For an editable install. Processes may run with the file that is there, and others begin to."""
        for extension in self.extensions:
            name = self.get_ext_filename(self.get_ext_fullname(extension.name))
            built, place = Path(self.build_lib, name), HERE / NATIVE / Path(name).name
            if not place.exists() or place.read_bytes() != built.read_bytes():
                beside = place.with_suffix(f".{os.getpid()}")
                shutil.copy(built, beside)
                beside.replace(place)


text = (HERE / "README.md").read_text(encoding="utf-8")
text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text)
text = re.sub(r"\[([^\]]+)\]\(#[^)]*\)", r"\1", text)
text = re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", r"\1 (`\2`)", text)
core = Extension(
    "weightcast.native._core",
    sorted(map(str, NATIVE.glob("*.c"))),
    depends=sorted(map(str, NATIVE.glob("*.h"))),
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if IS_LIMITED else [],
    py_limited_api=IS_LIMITED,
    # Aligned, since where a hot loop happens to begin is worth a sixth of the time for packing.
    extra_compile_args=[
        *("-std=c11", "-O3", "-falign-functions=64", "-falign-loops=64"),
        *("-Wall", "-Wextra", "-fvisibility=hidden", "-g0"),
    ],
    extra_link_args=["-pthread"],
)
setup(
    long_description=text,
    long_description_content_type="text/markdown",
    ext_modules=[core],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_LIMITED else {},
    setup_requires=["ziglang"] if IS_BY_ZIG else [],
)
