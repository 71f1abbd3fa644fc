"""Documentation: every command and snippet of every page runs, and every link leads somewhere."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.pages import ROOT, PageError, check_unrun, parse, run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(short_tmp: Path) -> Path:
    """Where a page runs: `model/` in it is a checkpoint in two shards, as the reader's own would be."""
    model = short_tmp / "model"
    model.mkdir()
    shards = {
        "model-00001-of-00002.safetensors": {"embed.weight": torch.randn(64, 32), "head.weight": torch.randn(64, 32)},
        "model-00002-of-00002.safetensors": {"layers.0.weight": torch.randn(32, 32), "layers.0.bias": torch.randn(32)},
    }
    for name, tensors in shards.items():
        save_file(tensors, model / name)
    places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return short_tmp


# -------------------------------------------------------------------------------------- pages
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_page_runs(page: Path, folder: Path) -> None:
    blocks = parse(by_name(page), page.read_text())
    run(blocks, folder)
    for block in blocks:
        if block.not_run:
            check_unrun(block)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            path, _, heading = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            if heading:
                headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
                assert heading in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}


# ------------------------------------------------------------------------------- the checking
def page_of(*lines: str) -> str:
    return "\n".join(lines)


def run_page(folder: Path, *lines: str) -> None:
    run(parse("page.md", page_of(*lines)), folder)


def test_blocks_run_in_order_in_one_folder(short_tmp: Path) -> None:
    run_page(
        short_tmp,
        "# Title",
        "```console",
        "$ word=hello",
        "$ printf '%s\\n' $word \\",
        ">   again >file",
        "$ cat file",
        "hello",
        "ag...",
        "```",
        "```python",
        "assert open('file').read() == 'hello\\nagain\\n'",
        "open('other', 'w').write('x')",
        "```",
        "```text",
        "not run",
        "```",
    )
    assert (short_tmp / "other").read_text() == "x"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["```console", "$ false", "```"], id="command fails"),
        pytest.param(["```console", "$ false | true", "```"], id="command in a pipe fails"),
        pytest.param(["```console", "$ echo hello", "hallo", "```"], id="output differs"),
        pytest.param(["```console", "$ echo hello; echo more", "hello", "```"], id="more output"),
        pytest.param(["```console", "$ echo hello", "hello", "more", "```"], id="less output"),
        pytest.param(["```python", "assert False", "```"], id="snippet fails"),
        pytest.param(
            ["```python", "import asyncio", "await asyncio.sleep(0)", "```"], id="snippet cannot be a file: it awaits"
        ),
    ],
)
def test_a_block_that_does_not_do_what_it_says_fails_its_page(short_tmp: Path, lines: list[str]) -> None:
    with pytest.raises(PageError, match=r"^page\.md:1: "):
        run_page(short_tmp, *lines)


def test_output_may_be_left_out_or_cut(short_tmp: Path) -> None:
    run_page(short_tmp, "```console", "$ echo hello", "```")
    run_page(short_tmp, "```console", "$ seq 9", "1", "...", "9", "```")


SERVER = """
trap 'echo ended >trace; kill $!; exit $1' TERM
sleep infinity &
echo up
echo ready socket=/x
wait $!
"""


@pytest.mark.parametrize("code", [0, 3])
def test_what_stays_running_serves_the_rest_of_the_page_and_must_end_well(short_tmp: Path, code: int) -> None:
    (short_tmp / "server.sh").write_text(SERVER)
    lines = [
        "<!-- stays running -->",
        "```console",
        f"$ bash server.sh {code}",
        "up",
        "ready socket=...",
        "```",
        "```console",
        "$ test ! -e trace",
        "```",
    ]
    if code:
        with pytest.raises(PageError, match="exit code 3 at SIGTERM"):
            run_page(short_tmp, *lines)
    else:
        run_page(short_tmp, *lines)
    assert (short_tmp / "trace").read_text() == "ended\n"


def test_what_was_to_stay_running_and_ended_fails_its_page(short_tmp: Path) -> None:
    with pytest.raises(PageError, match="ended after\nup"):
        run_page(short_tmp, "<!-- stays running -->", "```console", "$ echo up", "ready", "```")


def test_a_block_may_be_a_file_that_a_command_runs(short_tmp: Path) -> None:
    run_page(
        short_tmp,
        "<!-- saved as: hello.py -->",
        "```python",
        "print('hello')",
        "```",
        "<!-- saved as: names.json -->",
        "```json",
        "{}",
        "```",
        "```console",
        "$ python hello.py && cat names.json",
        "hello",
        "{}",
        "```",
    )


def test_what_is_not_run_is_not_run(short_tmp: Path) -> None:
    run_page(short_tmp, "<!-- not run: it takes an hour -->", "```console", "$ touch file", "```")
    assert not (short_tmp / "file").exists()


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["```", "$ true", "```"], "no language"),
        (["```sh", "true", "```"], "a block of sh"),
        (["  ```console", "  $ true", "  ```"], "indented"),
        (["```console", "true", "```"], "begins with a command"),
        (["```console", "$ true"], "ends inside a block"),
        (["<!-- not run: why -->"], "before one"),
        (["<!-- not run: why -->", "", "```console", "$ true", "```"], "no block follows"),
        (["<!-- not run -->", "```console", "$ true", "```"], "REASON"),
        (["<!-- not run: -->", "```console", "$ true", "```"], "REASON"),
        (["<!-- not run: why -->", "```text", "x", "```"], "not run anyway"),
        (["<!-- saved as: a.py -->", "```python", "1 / 0", "```"], "no command further down runs a.py"),
        (["```console", "$ python a.py", "```", "<!-- saved as: a.py -->", "```python", "1 / 0", "```"], "runs a.py"),
        (["<!-- saved as: ../a.py -->", "```python", "1 / 0", "```"], "saved as: NAME"),
        (["<!-- stays running -->", "```console", "$ sleep 9", "```"], "the output it is ready after"),
        (["<!-- stays running -->", "```console", "$ true", "$ sleep 9", "up", "```"], "one command"),
        (["<!-- stays running -->", "```python", "x", "```"], "one command"),
    ],
)
def test_what_would_escape_being_run_is_refused(lines: list[str], complaint: str) -> None:
    with pytest.raises(PageError, match=complaint):
        parse("page.md", page_of(*lines))


@pytest.mark.parametrize(
    ("language", "text", "right"),
    [
        ("python", "async def f():\n    await y", True),
        ("python", "async with x as y:\n    await y", False),
        ("python", "async with:", False),
        ("console", "$ make test lint", True),
        ("console", "$ make no-such-target", False),
        ("console", "$ echo 'unclosed", False),
        ("console", "$ pip install .", True),
        ("console", "$ wcache status --json", True),
        ("console", "$ wcache --version", True),
        ("console", "$ wcache status --no-such-option", False),
        ("console", "$ wcache no-such-verb", False),
    ],
)
def test_what_is_not_run_is_still_checked(language: str, text: str, right: bool) -> None:
    (block,) = parse("page.md", page_of("<!-- not run: why -->", f"```{language}", text, "```"))
    if right:
        check_unrun(block)
    else:
        with pytest.raises(PageError, match=r"^page\.md:2: "):
            check_unrun(block)
