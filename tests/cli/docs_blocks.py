"""Runs every fenced block of README.md and docs/*.md, from the files themselves.

usage: docs_blocks.py [--update] ROOT SCRATCH [PAGE...]

SCRATCH is a folder with the data that the pages name; each page gets a copy of it. --update writes the real outputs
into the pages, apart from those that contain "...". Blocks are marked by their
tag and by HTML comments directly above the fence:

  ```sh                        bash runs the block in the page's folder. It must exit with 0 and print nothing
                               on standard error.
  <!-- exit: N -->             the block exits with N, and may print on standard error
  <!-- output -->              the block below is what the sh block above prints on standard output
  <!-- output: stderr -->      the same for standard error
  <!-- from: PATH -->          the lines of the block stand in that file of the repository
  <!-- file: PATH -->          the block is the whole of that file, which another test runs
  <!-- not run: REASON -->     the block is counted, but not run

Output is compared after each number, hexadecimal id and temporary path is replaced by one sign and blanks are
squeezed. In an output "..." stands for any text, and alone on a line for any lines; in a quotation a line
"// ..." or "# ..." stands for any lines. Blocks tagged text or json without a mark are pictures.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

LIMIT_S = int(os.environ.get("DISTRAIN_TEST_LIMIT", "40"))
MARK = re.compile(r"<!-- *(exit|output|from|file|not run)(?:: *(.*?))? *-->$")
PICTURES = {"", "text", "json"}


class Block:
    def __init__(self, page, line, tag, text, marks):
        self.page, self.line, self.tag, self.text, self.marks = page, line, tag, text, marks

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(root, page):
    """Returns the fenced blocks of a page, and a problem for each indented block or unknown mark."""
    blocks, problems, marks = [], [], {}
    fence = None
    for number, line in enumerate((root / page).read_text().splitlines(), 1):
        if fence is not None:
            if line.strip() == "```":
                blocks.append(Block(page, fence[0], fence[1], "\n".join(fence[2]) + "\n", marks))
                fence, marks = None, {}
            else:
                fence[2].append(line[fence[3]:] if not line[:fence[3]].strip() else line)
        elif line.lstrip().startswith("```"):
            fence = (number, line.strip()[3:].strip(), [], len(line) - len(line.lstrip()))
        elif match := MARK.match(line.strip()):
            marks[match[1]] = match[2] or ""
        elif line.startswith("<!--"):
            problems.append(f"{page}:{number}: unknown mark: {line}")
        elif line.strip():
            if marks:
                problems.append(f"{page}:{number}: a mark stands above no block")
                marks = {}
            if line.startswith("    ") and not re.match(r" *([-*]|\d+\.) ", line) and not blocks_open_list(line):
                problems.append(f"{page}:{number}: an indented block: use a fence with a tag")
    if fence is not None:
        problems.append(f"{page}:{fence[0]}: the fence is not closed")
    return blocks, problems


def blocks_open_list(line):
    return len(line) - len(line.lstrip()) > 8  # a continued item of a nested list


def masked(line):
    line = re.sub(r'"(host|path)":"[^"]*"', r'"\1":"#"', line)
    line = re.sub(r"/tmp/\S+", "#", line)
    line = re.sub(r"(?<![\w.])(?=[0-9a-f]*[0-9])[0-9a-f]{8,}(?![\w.])", "#", line)
    line = re.sub(r"(?<![\w#])-?\d+(\.\d+)?([eE][-+]?\d+)?", "#", line)
    line = re.sub(r"\d+(\.\d+)?", "#", line)
    return " ".join(line.split())


def same(expected, actual):
    """Returns whether masked `actual` matches masked `expected`, in which "..." stands for any text."""
    pattern = ""
    for line in expected.splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*"
        else:
            parts = [re.escape(masked(part)) for part in line.split("...")]
            pattern += r" ?.*? ?".join(parts) + r"\n"
    text = "".join(masked(line) + "\n" for line in actual.splitlines())
    return re.fullmatch(pattern, text) is not None


def quoted(root, block):
    """Returns a problem if the file that the block names does not contain the block's lines."""
    path = root / block.marks["from"]
    if not path.is_file():
        return f"no file {block.marks['from']}"
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    groups = [[]]
    for line in block.text.splitlines():
        if line.strip() in ("// ...", "# ..."):
            groups.append([])
        elif line.strip():
            groups[-1].append(line.strip())
    start = 0
    for group in filter(None, groups):
        found = next((i for i in range(start, len(lines) - len(group) + 1)
                      if lines[i:i + len(group)] == group), None)
        if found is None:
            missing = next((line for line in group if line not in lines[start:]), group[0])
            return f"not in {block.marks['from']}, in this order: {missing}"
        start = found + len(group)
    return None


def run(block, folder):
    """Returns (exit code, stdout, stderr) of a block."""
    process = subprocess.Popen(["bash", "-eo", "pipefail", "-c", block.text], cwd=folder, text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nended after {LIMIT_S} s"
    return process.returncode, out, err


def excerpt(text, lines=12):
    all_lines = text.splitlines()
    return "".join(f"    {line[:300]}\n" for line in all_lines[:lines]) + ("    ...\n" if len(all_lines) > lines else "")


def write_outputs(root, page, updates):
    """Replaces outputs, the last one first so that line numbers stay valid."""
    lines = (root / page).read_text().splitlines()
    for block, actual in reversed(updates):
        if "file" in block.marks or "..." not in block.text:
            lines[block.line:block.line + block.text.count("\n")] = actual.splitlines()
    (root / page).write_text("\n".join(lines) + "\n")


def check_page(root, scratch, page, update=False):
    """Returns (blocks that ran, blocks, problems, time)."""
    blocks, problems = blocks_of(root, page)
    folder = scratch.parent / ("page-" + page.replace("/", "-"))
    shutil.copytree(scratch, folder, symlinks=True)
    ran = counted = 0
    took, updates = [], []
    last = None
    for block in blocks:
        if "not run" in block.marks:
            counted += 1
            last = None
            if not block.marks["not run"]:
                problems.append(f"{block}: not run, without a reason")
        elif "from" in block.marks:
            counted += 1
            problem = quoted(root, block)
            if problem:
                problems.append(f"{block}: {problem}")
            else:
                ran += 1
        elif "file" in block.marks:
            counted += 1
            last = None
            path = root / block.marks["file"]
            if not path.is_file():
                problems.append(f"{block}: no file {block.marks['file']}")
            elif update:
                updates.append((block, path.read_text()))
            elif block.text != path.read_text():
                problems.append(f"{block}: differs from {block.marks['file']}; --update copies the file")
            else:
                ran += 1
        elif "output" in block.marks:
            if last is None:
                problems.append(f"{block}: an output, but no block has run before it")
                continue
            if last[0] != expected:
                continue
            actual = last[1] if block.marks["output"] != "stderr" else last[2]
            if update:
                updates.append((block, actual))
            elif not same(block.text, actual):
                problems.append(f"{block}: the block above prints something else:\n{excerpt(actual)}")
        elif block.tag == "sh":
            counted += 1
            start = time.monotonic()
            last = run(block, folder)
            took.append((time.monotonic() - start, str(block)))
            expected = int(block.marks.get("exit", "0"))
            index = blocks.index(block)
            shows_stderr = any(b.marks.get("output") == "stderr" for b in blocks[index + 1:index + 3])
            if last[0] != expected:
                problems.append(f"{block}: exit code {last[0]}, not {expected}:\n{excerpt(block.text)}"
                                f"  its output ends with:\n{excerpt(last[1][-1500:])}{excerpt(last[2][-1500:])}")
            elif last[2] and not expected and not shows_stderr:
                problems.append(f"{block}: prints on standard error:\n{excerpt(last[2])}")
            else:
                ran += 1
        elif block.tag not in PICTURES:
            counted += 1
            problems.append(f"{block}: a {block.tag} block needs <!-- from: FILE -->, <!-- file: FILE --> or <!-- not run: REASON -->")
    shutil.rmtree(folder, ignore_errors=True)
    if updates:
        write_outputs(root, page, updates)
    return ran, counted, problems, took


def check_links(root, page):
    """Returns a problem for each link of a page to a file or heading that does not exist."""
    problems = []
    text = re.sub(r"```.*?```", "", (root / page).read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        file = (root / page).parent / path if path else root / page
        if not file.exists():
            problems.append(f"{page}: a link to {target}, which does not exist")
        elif heading:
            headings = re.findall(r"^#+ +(.*)$", file.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
            if heading not in slugs:
                problems.append(f"{page}: a link to {target}, which has no such heading")
    return problems


def main():
    update = "--update" in sys.argv
    root, scratch, *named = [each for each in sys.argv[1:] if each != "--update"]
    root, scratch = pathlib.Path(root), pathlib.Path(scratch)
    pages = named or ["README.md"] + sorted(f"docs/{file.name}" for file in (root / "docs").glob("*.md"))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda page: check_page(root, scratch, page, update), pages))
    problems = []
    for page, (ran, counted, page_problems, _) in zip(pages, results):
        print(f"{page}: {ran} of {counted}")
        problems += page_problems + check_links(root, page)
    slowest = sorted((each for result in results for each in result[3]), reverse=True)[:5]
    print("slowest:", ", ".join(f"{block} {seconds:.1f} s" for seconds, block in slowest))
    if "README.md" in pages:
        words = len((root / "README.md").read_text().split())
        print(f"README.md has {words} words")
        if words > 1000:
            problems.append(f"README.md has {words} words, more than 1000")
    ran, counted = sum(result[0] for result in results), sum(result[1] for result in results)
    percent = 100 * ran // max(counted, 1)
    print(f"{ran} of {counted} blocks ran ({percent} %)")
    if percent < 90 and not named:
        problems.append(f"only {percent} % of the blocks ran, not 90 %")
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
