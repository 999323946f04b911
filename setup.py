"""Build steps that pyproject.toml can't express: editable installs for type checkers, C kernels, README for an index."""

import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.editable_wheel import editable_wheel

HERE = Path(__file__).parent


class LinkedFolders(editable_wheel):  # type: ignore[misc]  # (setuptools has no types)
    """Put ``src`` on the path, with links to the package folders.

    For folders with other names, setuptools itself uses an import hook, which type checkers do not run.
    """

    def finalize_options(self) -> None:
        for package in ("parallel", "amp", "optim"):
            link = HERE / "src" / "meshstep" / package
            if not link.is_symlink():
                link.symlink_to(Path("..", "..", package), target_is_directory=True)
        self.distribution.package_dir = {"": "src"}
        super().finalize_options()


def for_an_index(readme: str) -> str:
    """Return the README without pictures and relative links, which do not work outside the repository."""
    readme = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n\n", "", readme, flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", readme)


# Plain C without headers of Python or torch, so one library works with all versions of both. Without a C compiler, the
# package uses torch's kernels.
NATIVE = "optim/kernels/csrc"
kernels = Extension(
    "meshstep.optim.kernels._native",
    sources=[f"{NATIVE}/native.c"],
    depends=[f"{NATIVE}/loops.h"],
    # No contraction of floating-point operations, so all instruction sets give bitwise identical results.
    extra_compile_args=[
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-Wno-psabi",
    ],
    extra_link_args=["-pthread"],
    libraries=["m"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[kernels],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    cmdclass={"editable_wheel": LinkedFolders},
    long_description=for_an_index((HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
