"""Documentation as a program: the fenced blocks of a page, run in order in one folder.

A ```console block is a bash script, its commands behind ``$`` and continued behind ``>``; what
stands under them is the output it must print, ``...`` standing for anything.  A ```python block
is a script as it stands.  Other languages are not run, and must be named.
One HTML comment above a block may say otherwise:

- ``<!-- not run: reason -->``: it cannot be; its syntax, make targets and options are checked.
- ``<!-- stays running -->``: its one command serves the rest of the page.  The page goes on when
  its output is there, and ends it with SIGTERM, to which it must exit with 0.
- ``<!-- saved as: name -->``: it is a file, which a command further down must run.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "PageError", "check_unrun", "parse", "run"]

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TIMEOUT_S = 100
RUN = ("console", "python")
NOT_RUN = ("json", "text", "toml", "yaml")


class PageError(Exception):
    """A page does not do what it says."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block; `line` is where its fence stands in the page, from 1."""

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""
    """Why, if it is not run."""
    stays: bool = False
    saved_as: str = ""
    """The file that it is, for commands further down."""

    def commands(self) -> list[str]:
        """The commands of a console block."""
        commands: list[str] = []
        continued = False
        for line in self.text.splitlines():
            if line.startswith("$ "):
                commands.append(line[2:])
            elif continued and line.startswith("> "):
                commands[-1] += "\n" + line[2:]
            continued = line.endswith("\\") and line.startswith(("$ ", "> "))
        return commands

    def output(self) -> list[str]:
        """The lines a console block is to print."""
        return [line for line in self.text.splitlines() if not line.startswith(("$ ", "> "))]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def parse(page: str, text: str) -> list[Block]:
    """The blocks of a page.  Raises PageError for what would escape being run."""
    blocks: list[Block] = []
    marker, fence, language, start = "", "", "", 0
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if fence:
            if line.rstrip() == fence:
                blocks.append(_block(page, start, language, "\n".join(body), marker))
                marker = fence = ""
            else:
                body.append(line)
        elif found := re.match(r"( *)(```+)(.*)", line):
            if found[1]:
                raise PageError(f"{page}:{number}: a fence that is indented")
            fence, language, start, body = found[2], found[3].strip(), number, []
        elif marker:
            raise PageError(f"{page}:{number}: no block follows the comment {marker!r}")
        elif found := re.fullmatch(r"<!-- *((?:not run|stays running|saved as).*?) *-->", line.strip()):
            marker = found[1]
    if fence or marker:
        raise PageError(f"{page}: ends inside a block, or before one")
    for number, block in enumerate(blocks):
        later = [command for other in blocks[number:] if not other.not_run for command in other.commands()]
        if block.saved_as and not any(block.saved_as in command for command in later):
            raise PageError(f"{block}: no command further down runs {block.saved_as}")
    return blocks


def _block(page: str, line: int, language: str, text: str, marker: str) -> Block:
    where = f"{page}:{line}"
    if language not in RUN + NOT_RUN:
        raise PageError(f"{where}: a block of {language or 'no language'}, not one of {', '.join(RUN + NOT_RUN)}")
    reason = re.fullmatch(r"not run: *(\S.*)", marker)
    saved = re.fullmatch(r"saved as: *([\w.]+)", marker)
    if marker and not reason and not saved and marker != "stays running":
        raise PageError(f"{where}: expected 'not run: REASON', 'saved as: NAME' or 'stays running', got {marker!r}")
    block = Block(
        page=page,
        line=line,
        language=language,
        text=text,
        not_run=reason[1] if reason else "",
        stays=marker == "stays running",
        saved_as=saved[1] if saved else "",
    )
    if marker and language not in RUN and not saved:
        raise PageError(f"{where}: {language} is not run anyway")
    if language == "console" and not text.startswith("$ "):
        raise PageError(f"{where}: a console block begins with a command behind '$ '")
    if block.stays and (language != "console" or len(block.commands()) != 1 or not block.output()):
        raise PageError(f"{where}: what stays running is one command, with the output it is ready after")
    return block


def run(blocks: list[Block], folder: Path) -> None:
    """Run what can be run, in order, in `folder`.  Raises PageError."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WCACHE_", "COVERAGE_", "COV_"))},
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": "100",
    }
    (folder / "run").mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as running:
        for block in blocks:
            if block.saved_as:
                (folder / block.saved_as).write_text(block.text + "\n")
                continue
            if block.not_run or block.language not in RUN:
                continue
            if block.stays:
                running.enter_context(_staying(block, folder, environment))
            elif block.language == "python":
                script = folder / f"block_{block.line}.py"
                script.write_text(block.text)
                _finish(block, [sys.executable, str(script)], folder, environment)
            else:
                _finish(block, _bash("\n".join(block.commands())), folder, environment)


def _bash(script: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", script]


def _finish(block: Block, argv: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    try:
        ran = subprocess.run(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise PageError(f"{block}: not done after {TIMEOUT_S} s; printed {late.stdout!r}, {late.stderr!r}") from late
    if ran.returncode:
        raise PageError(f"{block}: exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}")
    if block.language == "console" and block.output() and not _matches(block.output(), ran.stdout):
        expected = "\n".join(block.output())
        raise PageError(f"{block}: expected\n{expected}\ngot\n{ran.stdout}\n{ran.stderr}")


def _matches(expected: list[str], printed: str) -> bool:
    """Line for line; a line of nothing but ``...`` stands for any number of lines, even none."""
    patterns = [
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.rstrip()).replace(r"\.\.\.", ".*?") + r"[ ]*\n"
        for line in expected
    ]
    printed = printed if not printed or printed.endswith("\n") else printed + "\n"
    return re.fullmatch("".join(patterns), printed) is not None


@contextmanager
def _staying(block: Block, folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    log = folder / f"block_{block.line}.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            _bash(f"exec {block.commands()[0]}"),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            printed = ""
            while not _matches(block.output(), printed):
                line = process.stdout.readline() if process.stdout else ""
                if not line:
                    raise PageError(f"{block}: ended after\n{printed}\n{log.read_text()}")
                printed += line
            yield
            process.send_signal(signal.SIGTERM)
            if process.wait(TIMEOUT_S):
                raise PageError(f"{block}: exit code {process.returncode} at SIGTERM\n{log.read_text()}")
        finally:
            process.kill()


def check_unrun(block: Block) -> None:
    """What can be told of a block without running it.  Raises PageError."""
    if block.language == "python":
        try:
            compile(block.text, str(block), "exec")
        except SyntaxError as error:
            raise PageError(f"{block}: {error}") from error
        return
    for command in block.commands():
        if _fails(["bash", "-n", "-c", command]):
            raise PageError(f"{block}: bash does not understand {command!r}")
        words = command.replace("\\\n", " ").split()
        targets = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
        if words[0] == "make" and _fails(["make", "--directory", str(ROOT), "--dry-run", *targets]):
            raise PageError(f"{block}: no such target: {command!r}")
        if words[0] == "wcache":
            verb = [word for word in words[1:2] if not word.startswith("-")]
            known = subprocess.run([str(BIN / "wcache"), *verb, "--help"], capture_output=True, text=True, check=False)
            options = [word.split("=")[0] for word in words if word.startswith("--")]
            if known.returncode or not set(options) <= set(re.findall(r"--[a-z-]+", known.stdout)):
                raise PageError(f"{block}: not an option or verb of wcache: {command!r}\n{known.stdout}{known.stderr}")


def _fails(argv: list[str]) -> bool:
    return subprocess.run(argv, capture_output=True, check=False).returncode != 0
