"""The pages of the API, from the docstrings: `python docs/api.py site`, with `pip install 'meshstep[docs]'`.

A warning is an error: an annotation that can't be looked up is one that a reader can't follow either.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

# Each with all modules below it. The front, `meshstep`, offers the same names and looks them up when they are asked for,
# which pdoc takes for modules.
MODULES = ("meshstep.parallel", "meshstep.amp", "meshstep.optim", "meshstep.testing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the pages go")
    folder = parser.parse_args().folder
    import pdoc

    warnings.simplefilter("error", UserWarning)
    # pdoc looks up what a NamedTuple's constructor is annotated with where `collections` made that.
    warnings.filterwarnings("ignore", r"Error parsing .* for meshstep\.optim\.(Norms|Decision|Trial)\.__init__")
    pdoc.render.configure(docformat="google", math=True, footer_text="meshstep")
    pdoc.pdoc(*MODULES, output_directory=folder)
    print(f"{len([*folder.rglob('*.html')])} pages in {folder}")


if __name__ == "__main__":
    main()
