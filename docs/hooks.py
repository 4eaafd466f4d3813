"""What `mkdocs.yml` needs to build the site; see CONTRIBUTING.md.

Pages keep their paths in the repository, so that a link in a file means the
same on the site as beside the file.
"""

import logging
import pathlib
import posixpath
import re

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
TEXTS = ("README.md", "BUILD_NOTES.md", "CONTRIBUTING.md", "CHANGELOG.md")
FILES = ("CITATION.cff", "LICENSE", "NOTICE")
LOG = logging.getLogger("mkdocs.hooks")


def on_files(files, config):
  """Replaces the files of `docs/` by those of the repository."""
  for file in [f for f in files if f.src_dir == config.docs_dir]:
    files.remove(file)
  paths = [ROOT / name for name in (*TEXTS, *FILES)]
  paths += (ROOT / "docs").rglob("*.md")
  paths += (ROOT / "docs").glob("site.*")
  paths += [p for p in (ROOT / "results").rglob("*") if p.is_file()]
  for path in paths:
    name = path.relative_to(ROOT).as_posix()
    files.append(File(name, ROOT, config.site_dir, config.use_directory_urls))
  made = {
    f"{p}/index.md": _listing(p)
    for p in _folders()
    if not (ROOT / p / "README.md").exists()
  }
  made["docs/api/index.md"] = _names()
  for path in (ROOT / "examples").glob("*.py"):
    code = path.read_text(encoding="utf-8")
    page = f"# {path.name}\n\n```python\n{code}```\n"
    made[f"examples/{path.name}.md"] = page
  for name, content in made.items():
    files.append(File.generated(config, name, content=content))
  return files


def _names():
  """A page with the names that `hetfl` exports, and where they are."""
  package = griffe.load("hetfl", search_paths=[ROOT])
  lines = ["# Names", "", "What `import hetfl` gives:", ""]
  lines += ["| name | what it is |", "|---|---|"]
  for name in package.exports:
    target = package[name].final_target
    what = target.docstring.value.splitlines()[0]
    lines.append(f"| [`hetfl.{name}`][{target.path}] | {what} |")
  return "\n".join(lines) + "\n"


def _folders():
  """The folders of runs and searches."""
  found = (p.relative_to(ROOT) for p in (ROOT / "results").rglob("*/"))
  return [p.as_posix() for p in found if p.as_posix() != "results"]


def _links(folder):
  """Links to what is in a folder."""
  inside = sorted((ROOT / folder).iterdir())
  return [f"* [{p.name}]({p.name})" for p in inside if p.name != "README.md"]


def _listing(folder):
  """A page with the pictures and links of a folder."""
  lines = [f"# {folder.removeprefix('results/')}", "", *_links(folder)]
  pictures = sorted((ROOT / folder).glob("*.png"))
  lines += [f"\n![{p.stem}]({p.name})" for p in pictures]
  return "---\nsearch: {exclude: true}\n---\n" + "\n".join(lines) + "\n"


def on_page_markdown(markdown, page, files, **_):
  """Links to a folder, an example or a module lead to its page."""
  here = posixpath.dirname(page.file.src_uri)
  if re.fullmatch("results/.+/README.md", page.file.src_uri):
    markdown += "\n\n## Files\n\n" + "\n".join(_links(here))
  if page.file.src_uri == "docs/papers.md":
    _check_quotes(markdown)
  if page.file.src_uri == "docs/settings.md":
    page.meta["search"] = {"boost": 4}  # Who searches a flag wants this page.

  def to_page(match):
    target = posixpath.normpath(posixpath.join(here, match[1]))
    module = target.removesuffix(".py").replace("/", ".")
    if target.startswith("hetfl/") and (page_of := _page_of(module)):
      return f"]({posixpath.relpath(page_of, here)}#{module})"
    for end in ("/README.md", "/index.md", ".md"):
      if target + end in files.src_uris:
        return f"]({match[1].rstrip('/')}{end})"
    return match[0]

  return re.sub(r"\]\(([^)#\s]+)\)", to_page, markdown)


def _page_of(module):
  """The page of the reference with a module; `None` if none has it."""
  for path in (ROOT / "docs/api").glob("*.md"):
    if f"::: {module}\n" in path.read_text(encoding="utf-8"):
      return path.relative_to(ROOT).as_posix()
  return None


def _check_quotes(markdown):
  """Warns of code in the tables of docs/papers.md that is not in hetfl."""
  folder = ROOT / "hetfl/algorithms"
  code = " ".join(p.read_text(encoding="utf-8") for p in folder.glob("*.py"))
  squeeze = lambda text: re.sub(r"\s", "", text)
  code = squeeze(code)
  for row in re.findall(r"^\|.*\|$", markdown, re.M):
    for quote in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1]):
      if squeeze(quote) not in code:
        LOG.warning("docs/papers.md quotes `%s`, which is not there", quote)


class Doctests(griffe.Extension):
  """Makes Markdown of docstrings."""

  def on_instance(self, *, obj, **_):
    """Fences doctests; keeps "Reference:" from being a section's title."""
    if obj.docstring:
      text = re.sub(
        r"^>>> .*(?:\n(?!\s*$).*)*",
        lambda match: f"```pycon\n{match[0]}\n```",
        obj.docstring.value,
        flags=re.M,
      )
      # Equations below each other stay so.
      text = re.sub(r"^(`[^`\n]+`)\n(?=`)", r"\1  \n", text, flags=re.M)
      obj.docstring.value = re.sub(
        r"^(Reference|Departures?):", r"**\1:**", text, flags=re.M
      )
