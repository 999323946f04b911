"""MkDocs hooks: find the pages of the repository, order them by purpose, and make one page per exported name.

A page is any Markdown file of the repository, under its own path, so links between pages stay as they are in the files. The
section of a page is its folder (``docs/howto``), or else the heading under which ``docs/README.md`` links it. Within a
section, pages have the order of their first links there.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html import unescape
from pathlib import Path
from posixpath import dirname, normpath, relpath
from posixpath import join as join_paths
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("docs", "examples", "parallel", "amp", "optim")
FRONT, INDEX, API = "README.md", "docs/README.md", "docs/api"
PACKAGES = ("meshstep.parallel", "meshstep.amp", "meshstep.optim", "meshstep.testing")
# Exported names that torch has too. A page may mean torch's, so these names are not linked by themselves.
ALSO_IN_TORCH = {
    "Adafactor",
    "ConstantLR",
    "CosineAnnealingLR",
    "DataParallel",
    "GradScaler",
    "Muon",
    "MultiStepLR",
    "PolynomialLR",
    "clip_grad_norm_",
    "clip_grad_value_",
}
OTHER_HOST = re.compile(r"[a-z]+:")

# Section, a heading of docs/README.md -> the folder of its pages. Other pages belong to the heading that links them.
SECTIONS = {
    "Tutorials": "docs/tutorials",
    "How-to guides": "docs/howto",
    "Integrations": "docs/integrations",
    "Reference": "docs/reference",
    "Explanation": "docs/explanation",
    "Maintainers": "docs/maintainers",
}
REST = "Maintainers"  # pages that docs/README.md does not link

# Pages and navigation -------------------------------------------------------------------------------------------------


def pages_of_repository() -> list[str]:
    """Return the paths of all Markdown files of the repository, relative to its root."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in (*sorted(ROOT.glob("*.md")), *found)]


def url_path(page: str) -> str:
    """Return the path of a page on the site, such as ``howto/clip_rules/index.html``."""
    name = page.removeprefix("docs/")
    if page == INDEX:
        return "pages/index.html"
    if page.startswith(f"{API}/"):  # Python names keep upper and lower case
        return name.removesuffix("index.md").removesuffix(".md").rstrip("/") + "/index.html"
    folder, stem = dirname(name).lower(), Path(name).stem.lower()
    parts = [part for part in (folder, "" if stem == "readme" else stem) if part]
    return "/".join([*parts, "index.html"])


def links_of(text: str, page: str) -> Iterator[tuple[str, str]]:
    """Yield (heading of the second level, path of the linked file) for each link to a file."""
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:].strip()
        for target in re.findall(r"\]\(([^)#]+)", line):
            if not OTHER_HOST.match(target):
                yield heading, normpath(join_paths(dirname(page), target))


def section_of(page: str, headings: dict[str, str]) -> str:
    """Return the section of a page.

    Args:
        page: Its path.
        headings: For pages that docs/README.md links, the first heading with a link.
    """
    by_folder = (section for section, folder in SECTIONS.items() if page.startswith(f"{folder}/"))
    heading = headings.get(page, REST)
    return next(by_folder, heading if heading in SECTIONS else REST)


def navigation(pages: list[str], api: list[Any]) -> list[Any]:
    """Return MkDocs' ``nav``: the front page, then one entry per section with pages."""
    headings: dict[str, str] = {}
    for heading, target in links_of((ROOT / INDEX).read_text(encoding="utf-8"), INDEX):
        if heading:
            headings.setdefault(target, heading)
    order = {page: position for position, page in enumerate(headings)}
    sections: dict[str, list[Any]] = {section: [] for section in SECTIONS}
    for page in sorted(pages, key=lambda page: (order.get(page, len(order)), page)):
        if page not in (FRONT, INDEX):
            sections[section_of(page, headings)].append(page)
    for section, content in sections.items():  # the README of a folder comes first in its section
        content.sort(key=lambda page: page != f"{SECTIONS[section]}/README.md")
    sections["Reference"].append({"API": api})
    return [{"Home": [FRONT, INDEX]}, *({name: content} for name, content in sections.items() if content)]


# API pages ------------------------------------------------------------------------------------------------------------


@dataclass
class Sources:
    """Finds where exported names are defined. It parses the files, so a build does not import torch."""

    trees: dict[Path, ast.Module] = field(default_factory=dict)

    def tree(self, path: Path) -> ast.Module:
        if path not in self.trees:
            self.trees[path] = ast.parse(path.read_text(encoding="utf-8"))
        return self.trees[path]

    def file(self, module: str) -> Path:
        path = (ROOT / "src").joinpath(*module.split("."))
        own = ROOT.joinpath(*module.split(".")[1:])  # packages are found also without the links in src/
        for base in (path, own):
            if (base / "__init__.py").is_file():
                return base / "__init__.py"
            if base.with_suffix(".py").is_file():
                return base.with_suffix(".py")
        raise FileNotFoundError(f"module {module} has no file in {ROOT}")

    def exports(self, package: str) -> list[str]:
        """Return the names in the package's ``__all__``."""
        for node in self.tree(self.file(package)).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == "__all__"
            ):
                return sorted(ast.literal_eval(node.value))
        raise ValueError(f"{package} has no __all__ that is a list of strings; write one")

    def definitions(self) -> Counter[str]:
        """Return for each public name the number of modules that define a function or class of this name."""
        paths = [path for package in ("parallel", "amp", "optim") for path in sorted((ROOT / package).rglob("*.py"))]
        paths += sorted((ROOT / "src" / "meshstep" / "testing").rglob("*.py"))
        nodes = (node for path in paths for node in self.tree(path).body)
        return Counter(n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name[0] != "_")

    def summary(self, module: str, name: str) -> str:
        """Return the first line of a name's docstring, without a period; "" if it has none."""
        path = self.file(module)
        body = self.tree(path).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return (ast.get_docstring(node) or "").partition("\n")[0].rstrip(".")
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                text = following.value if isinstance(following, ast.Expr) else None
                return str(text.value).partition("\n")[0].rstrip(".") if isinstance(text, ast.Constant) else ""
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.level:
                        parts = module.split(".")
                        base = parts[: len(parts) - node.level + (path.name == "__init__.py")]
                        return self.summary(".".join([*base, *(node.module or "").split(".")]).rstrip("."), alias.name)
        return ""


def api_pages() -> tuple[dict[str, str], list[Any]]:
    """Return the Markdown of each API page by its path, and their entries for the navigation."""
    sources, pages, entries = Sources(), dict[str, str](), list[Any]()
    overview = [
        "# API",
        "One page per exported name. `meshstep` exports the names of `meshstep.parallel`, `meshstep.amp` and "
        "`meshstep.optim`, so `from meshstep import P` works too.",
        "Examples use names such as `registry`, `model` and `adamw` without defining them. "
        "[The tutorial](../tutorials/FIRST_MLP.md) shows how to make such objects.",
    ]
    for package in PACKAGES:
        names = sources.exports(package)
        rows = [f"| [`{name}`]({package}/{name}.md) | {sources.summary(package, name)} |" for name in names]
        table = "\n".join(["| name | |", "|---|---|", *rows])
        doc = ast.get_docstring(sources.tree(sources.file(package))) or ""
        pages[f"{API}/{package}/index.md"] = f"# {package}\n\n{doc}\n\n{table.replace(f']({package}/', '](')}\n"
        pages |= {f"{API}/{package}/{name}.md": f"::: {package}.{name}\n" for name in names}
        overview += [f"## {package}", table]
        entries.append({package: [f"{API}/{package}/index.md", *({n: f"{API}/{package}/{n}.md"} for n in names)]})
    pages[f"{API}/index.md"] = "\n\n".join(overview) + "\n"
    return pages, [f"{API}/index.md", *entries]


@cache
def linked_names() -> set[str]:
    """Return the exported names that a page means whenever it has them in code marks.

    torch does not have these names, and no two modules of meshstep define them.
    """
    sources = Sources()
    definitions = sources.definitions()
    names = {name for package in PACKAGES for name in sources.exports(package)}
    return {name for name in names - ALSO_IN_TORCH if definitions[name] <= 1}


# Hooks ----------------------------------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace MkDocs' files of ``docs`` by the pages of the repository, their pictures, and the API pages."""
    from mkdocs.structure.files import File

    for file in [*files]:
        if file.src_uri.endswith((".md", ".py", ".json", ".svg", ".pyc")):
            files.remove(file)
    pages = pages_of_repository()
    pictures = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.svg")]
    for path in (*pages, *pictures):
        dest = url_path(path) if path.endswith(".md") else path.removeprefix("docs/")
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=dest))
    generated, entries = api_pages()
    for path, content in generated.items():
        file = File.generated(config, path, content=content)
        file.dest_uri = url_path(path)
        files.append(file)
    config.nav = navigation(pages, entries)
    return files


LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files that are not on the site into links to the code host, or into text without ``repo_url``."""

    def rewritten(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, _, heading = target.partition("#")
        if picture or not path or OTHER_HOST.match(target):
            return match[0]
        name = normpath(join_paths(dirname(page.file.src_uri), path))
        for candidate in (name, f"{name}/README.md"):
            if files.get_file_from_path(candidate) is not None:
                link = relpath(candidate, dirname(page.file.src_uri) or ".")
                return f"[{text}]({link}{'#' + heading if heading else ''})"
        if not (ROOT / name).exists():
            return match[0]  # MkDocs warns about this link
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{name})" if config.repo_url else text

    return "".join(
        part if part.startswith("```") else LINK.sub(rewritten, part)
        for part in re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    )


_NAME = re.compile(r"(<a\b.*?</a>|<pre\b.*?</pre>|<h[1-6]\b.*?</h[1-6]>)|<code>(\w+)(\(\))?</code>", re.DOTALL)


_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</(?:span|div)>', re.DOTALL)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link exported names in code marks to their API pages, and write formulas as MathML, which needs no script."""
    if "arithmatex" in html:
        from latex2mathml.converter import convert

        html = _FORMULA.sub(
            lambda match: convert(unescape(match[2]), display="block" if match[1] == "div" else "inline"), html
        )
    names = linked_names()
    targets = {Path(file.src_uri).stem: file for file in files if file.src_uri.startswith(f"{API}/")}

    def linked(match: re.Match[str]) -> str:
        file = targets.get(match[2]) if match[2] in names else None
        if file is None or file is page.file:
            return match[0]
        return f'<a href="{file.url_relative_to(page.file)}">{match[0]}</a>'

    html = _NAME.sub(linked, html)
    # Allow a line break after the module name.
    return re.sub(r"(<span class=\"doc doc-object-name[^>]*>)(meshstep\.\w+\.)", r"\1\2<wbr>", html)
