"""Count the lines of Python by folder: all, and of these code and docstrings. `make size` prints them."""

import ast
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def counted(file: Path) -> tuple[int, int, int]:
    """Return the lines of a file: all, those with code, and those of docstrings."""
    text = file.read_text(encoding="utf-8")
    documented = (node.body[0] for node in ast.walk(ast.parse(text)) if isinstance(node, _WITH_DOCSTRING) and node.body)
    docstrings = {
        line
        for first in documented
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
        for line in range(first.lineno, (first.end_lineno or first.lineno) + 1)
    }
    with file.open("rb") as lines:
        tokens = [token for token in tokenize.tokenize(lines.readline) if token.type not in _SKIPPED]
    code = {
        line for token in tokens[1:] for line in range(token.start[0], token.end[0] + 1)
    }  # the first is the encoding
    return len(text.splitlines()), len(code - docstrings), len(docstrings)


def sizes(folder: Path) -> list[tuple[str, int, int, int, int]]:
    """Return a folder and the folders in it, each with its files and their lines; a folder's own files count in it."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for file in sorted(folder.rglob("*.py")):
        found.setdefault("/".join(file.relative_to(ROOT).parts[:-1][:2]), []).append(counted(file))
    each = [(name, len(files), *map(sum, zip(*files, strict=True))) for name, files in found.items()]
    return [*each, (f"{folder.name}, all", *map(sum, zip(*(row[1:] for row in each), strict=True)))]


def main() -> None:
    print(f"{'':24}{'files':>7}{'lines':>8}{'code':>8}{'docstrings':>12}")
    for name in ("fedkernels", "fedssl", "tests", "benchmarks", "website"):
        for folder, files, lines, code, docstrings in sizes(ROOT / name):
            print(f"{folder:24}{files:7,}{lines:8,}{code:8,}{docstrings:12,}")


if __name__ == "__main__":
    main()
