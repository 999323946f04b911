"""What pyproject.toml can't say: an editable install that type checkers see, C kernels, and the README for an index."""

import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.editable_wheel import editable_wheel

HERE = Path(__file__).parent


class LinkedFolders(editable_wheel):  # type: ignore[misc]  # (setuptools has no types)
    """Puts ``src`` on the path, and links the packages' folders there.

    setuptools' own way for folders with other names is a hook for imports, which no type checker runs.
    """

    def finalize_options(self) -> None:
        for package in ("parallel", "amp", "optim"):
            link = HERE / "src" / "meshstep" / package
            if not link.is_symlink():
                link.symlink_to(Path("..", "..", package), target_is_directory=True)
        self.distribution.package_dir = {"": "src"}
        super().finalize_options()


def for_an_index(readme: str) -> str:
    """Without pictures and links to files of the repository, which lead nowhere from elsewhere."""
    readme = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n\n", "", readme, flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", readme)


# Plain C, without Python's or torch's headers: one library serves all versions of both. Without a compiler the package
# works by torch's kernels.
NATIVE = "optim/kernels/csrc"
kernels = Extension(
    "meshstep.optim.kernels._native",
    sources=[f"{NATIVE}/native.c"],
    depends=[f"{NATIVE}/loops.h"],
    # Operations as they are written: all instruction sets give the same bits.
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
