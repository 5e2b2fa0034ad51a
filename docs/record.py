#!/usr/bin/env python3
"""Records docs/terminal.svg, the picture of README.md, from a real run in tmux.

usage: docs/record.py [BINARY [DATA-FOLDER]]

BINARY is build/release/bin/distrain and DATA-FOLDER is .deps/data unless given. Needs tmux. The picture plays
once and stays on its last screen, which is also what a viewer without animation shows.
"""

import html
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

COLUMNS, ROWS = 80, 20
COMMANDS = [
    "distrain hybrid --data r8.train --test-data r8.test --optimizer adagrad \\\n"
    "    --epochs 12 --pretty",
]
FRAME_S = 0.25
WIDTH, HEIGHT, LEFT, TOP = 8.4, 19, 14, 24  # of a character, and of the margins
COLORS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "36": "#79c0ff", "2": "#8b949e", "90": "#8b949e"}


def tmux(*arguments):
    return subprocess.run(["tmux", "-L", f"record{os.getpid()}", *arguments], check=True, text=True,
                          stdout=subprocess.PIPE).stdout


def screen():
    """Returns the rows of the terminal, with the escape sequences of their colors."""
    rows = tmux("capture-pane", "-e", "-p", "-t", "0").split("\n")[:ROWS]
    return [row.rstrip() for row in rows] + [""] * (ROWS - len(rows))


def has_ended(count, folder):
    return (folder / f"ended{count}").exists()


def record(binary, data):
    """Runs the commands, and returns [(seconds, rows)], a pair for each change of the screen."""
    folder = pathlib.Path(tempfile.mkdtemp())
    for name in ("r8.train", "r8.test"):
        (folder / name).symlink_to((data / name).resolve())
    (folder / "bin").mkdir()
    (folder / "bin/distrain").symlink_to(binary.resolve())
    (folder / "rc").write_text(
        f"PS1='$ ' PS2=; PATH={folder}/bin:$PATH; n=0; cd {folder}; unset HISTFILE\n"
        "PROMPT_COMMAND='[ $n = 0 ] || touch ended$n; n=$((n + 1))'\nclear\n")
    frames = []
    tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), f"bash --noprofile --rcfile {folder}/rc")
    try:
        time.sleep(1)
        start = time.monotonic()

        def look():
            rows = screen()
            if not frames or frames[-1][1] != rows:
                frames.append((time.monotonic() - start, rows))

        for count, command in enumerate(COMMANDS, 1):
            look()
            tmux("send-keys", "-t", "0", "-l", command)
            look()
            time.sleep(0.8)
            tmux("send-keys", "-t", "0", "Enter")
            while not has_ended(count, folder):
                if time.monotonic() - start > 300:
                    sys.exit(f"does not end: {command}")
                look()
                time.sleep(FRAME_S)
            time.sleep(0.3)
            look()
            time.sleep(0.7)
    finally:
        tmux("kill-server")
        shutil.rmtree(folder)
    return frames


def spans(row):
    """Returns [(column, text, color, is_bold)] of a row with escape sequences."""
    result, column, color, bold = [], 0, None, False
    for part in re.split(r"(\x1b\[[0-9;]*m)", row):
        if part.startswith("\x1b["):
            for code in part[2:-1].split(";"):
                if code in ("", "0", "39"):
                    color, bold = None, bold and code == "39"
                elif code == "1":
                    bold = True
                else:
                    color = COLORS.get(code, color)
        else:
            if part.strip():
                result.append((column + len(part) - len(part.lstrip()), part.strip(), color, bold))
            column += len(part)
    return result


def text_of(row, y, extra):
    out = []
    for column, text, color, bold in spans(row):
        style = (f' fill="{color}"' if color else "") + (' font-weight="bold"' if bold else "")
        out.append(f'<text x="{LEFT + column * WIDTH:.0f}" y="{y}" textLength="{len(text) * WIDTH:.0f}"{style}>'
                   f"{html.escape(text, quote=False)}</text>")
    return f"<g{extra}</g>\n".replace("</g>", "".join(out) + "</g>") if out else ""


def draw(frames):
    """Returns the picture: of each row all that it ever shows, visible while it is shown."""
    end = frames[-1][0]
    used = max(i for _, rows in frames for i, row in enumerate(rows) if row) + 1
    body = ""
    for index in range(used):
        y = TOP + 14 + index * HEIGHT
        states = []  # (begin, row)
        for at, rows in frames:
            if not states or states[-1][1] != rows[index]:
                states.append((at, rows[index]))
        for number, (begin, row) in enumerate(states):
            is_last = number + 1 == len(states)
            if is_last:
                hide = f'><set attributeName="visibility" to="hidden" begin="0s" end="{begin:.1f}s"/>' if begin else ">"
                body += text_of(row, y, hide)
            else:
                stop = states[number + 1][0]
                body += text_of(row, y, f' visibility="hidden"><set attributeName="visibility" to="visible" '
                                        f'begin="{begin:.1f}s" end="{stop:.1f}s"/>')
    width, height = LEFT * 2 + COLUMNS * WIDTH, TOP + 24 + used * HEIGHT
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
            f'height="{height}" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="14" '
            f'fill="#e6edf3" xml:space="preserve">\n'
            f'<title>distrain in a terminal</title><!-- made by docs/record.py in {end:.0f} s -->\n'
            f'<rect width="100%" height="100%" rx="8" fill="#0d1117" stroke="#6e7681"/>\n{body}</svg>\n')


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    binary = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / "build/release/bin/distrain"
    data = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else root / ".deps/data"
    picture = draw(record(binary, data))
    (root / "docs/terminal.svg").write_text(picture)
    print(f"docs/terminal.svg: {len(picture)} bytes")


if __name__ == "__main__":
    main()
