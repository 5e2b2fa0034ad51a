"""usage: report.py NAME PAGE ARGUMENT...: see report.sh.

Opens a page of `distrain report` at two widths, light and dark. Checks that it has no error, asks for nothing, is no wider
than the window, and has the charts, points and texts of the runs in its logs. With DISTRAIN_PICTURES=DIR, it keeps
pictures of the page there."""

import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
from browser import Browser  # noqa: E402

name, page, *arguments = sys.argv[1:]
logs = [each for each in arguments if each.endswith(".jsonl")]
lines = []
for log in logs:
    with open(log, errors="replace") as file:
        for text in file:
            try:
                lines.append(json.loads(text))
            except ValueError:
                pass
failures = []


def count(event, **fields):
    return sum(line.get("event") == event and all(line.get(k) == v for k, v in fields.items()) for line in lines)


def check(what, is_so, found=""):
    if not is_so:
        failures.append(f"{name}, {what}: {str(found)[:600]}")


# The charts of each page with their number of points, and texts that it has.
distinct_steps = len({(line["step"], line["rank"]) for line in lines if line.get("event") == "step" and "step" in line and
                      isinstance(line.get("rank"), int)})
steps, evals = count("step"), count("eval")
charts, texts = {
    "hybrid": ({"Loss": steps + evals, "Accuracy": evals, "Samples per second": steps},
               ["Finished: ", "Where the time went", "--epochs", "trainer1"]),
    "rnn": ({"Loss": steps + evals, "Perplexity": count("epoch") + evals, "Learning rate": steps,
             "Words per second": steps}, ["perplexity", "Learning rate"]),
    "rl": ({"Reward": 3 * count("episode"), "Env steps per second": count("episode")},
           ["Goal not reached: not solved after 20 episodes", "running mean", "threshold"]),
    "ps": ({"Loss": steps + evals, "Staleness": steps}, ["parameter_server", "all ranks", "waited s"]),
    "sweep": ({"Seconds per batch": 2 * 3}, ["1f1b, 3 stages, 4 micro-batches", "Schedule", "bubble %", "Data as a table"]),
    "returned": ({"Loss": distinct_steps + evals, "Staleness": distinct_steps},
                 ["trainers lost: 1, returned: 1, restarts: 1", "What happened", "killed by SIGKILL", "returned"]),
    "restart": ({"Loss": distinct_steps + evals}, ["Finished: ", "restarts: 1", "checkpoint loaded", "restart"]),
    "failed": ({"Loss": distinct_steps + evals},
               ["Failed: rank 2 (trainer2) was killed by SIGKILL", "Then failed: rank 0 (parameter_server), rank 1 (trainer1)."]),
    "ten": ({"Loss": 10 * 30, "Loss of the evaluation": evals, "Accuracy": evals}, ["10 runs", "lr 0.3, seed 3", "--lr"]),
    "hostile": ({"Loss": 2}, ["2 runs", "Failed: mmmm", "[truncated]", "<script>", "1 lines were skipped"]),
}[name]

browser = Browser()
try:
    for width in (1280, 400):
        for dark in (False, True):
            where = f"{width} pixels, {'dark' if dark else 'light'}"
            browser.open(page, width, dark)
            if os.environ.get("DISTRAIN_PICTURES"):
                browser.picture(f"{os.environ['DISTRAIN_PICTURES']}/{name}.{width}.{'dark' if dark else 'light'}.png")
            # Opens all sections, among them the tables that are made only then, and waits until they are drawn.
            browser.run("document.querySelectorAll('details').forEach(each => each.open = true);"
                        "new Promise(done => setTimeout(done, 200))")
            found = browser.run("Object.fromEntries([...document.querySelectorAll('[data-points]')].map(plot => "
                                "[plot.closest('figure').querySelector('h3').textContent, +plot.dataset.points]))")
            check(where, all(found.get(chart) == points for chart, points in charts.items()), (found, charts))
            text = browser.run("document.body.innerText")
            for each in texts:
                check(where, each in text, (each, text))
            check(where, browser.run("document.documentElement.scrollWidth") <= width, "is wider than the window")
            wide = browser.run(
                "[...document.querySelectorAll('body *')].filter(each => !each.closest('.scroll, pre, .u-over, .u-axis') && "
                f"each.getBoundingClientRect().right > {width} + 1).map(each => each.outerHTML.slice(0, 90))")
            check(where, not wide, wide)
            back, fore = browser.run("(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))")
            check(where, (int(back.split("(")[1].split(",")[0]) < 128) == dark, (back, fore))
            check(where, browser.run("[...document.querySelectorAll('canvas')].every(each => each.width > 100 && "
                                     "each.getContext('2d').getImageData(0, 0, each.width, each.height).data.some(v => v))"),
                  "an empty chart")
            # Each picture has a name for screen readers, and each chart a table beside it.
            check(where, browser.run("[...document.querySelectorAll('[role=img]')].every(each => "
                                     "each.getAttribute('aria-label').length > 20)"), "a picture without a description")
            check(where, browser.run("[...document.querySelectorAll('[data-points]')].every(each => "
                                     "each.closest('figure').querySelectorAll('tbody tr').length > 0)"), "a chart without a table")
            # The x axis and the legend are used by the keyboard's clicks.
            ways = browser.run("[...document.querySelectorAll('[data-x]')].map(each => (each.click(), "
                               "document.querySelectorAll('.charts figure').length > 0 && each.getAttribute('aria-pressed')))")
            check(where, all(way == "true" for way in ways), ways)
            browser.run("new Promise(done => setTimeout(done, 100))")
            hidden = browser.run("(key => key ? (key.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'})), "
                                 "[key.parentNode.classList.contains('u-off'), key.getAttribute('aria-pressed')]) : null)"
                                 "(document.querySelector('.u-series th[role=button]'))")
            check(where, hidden in ([True, "false"], None), hidden)
            check(where, not browser.problems, browser.problems)
            check(where, browser.requests == ["file://" + os.path.abspath(page)], browser.requests)
            check(where, "broken" not in browser.run("document.title").replace(arguments[0], "")[:8], "a text became a script")
finally:
    browser.close()
print("\n".join(failures))
sys.exit(len(failures) > 0)
