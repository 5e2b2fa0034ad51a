"""check_trace.py FILE RANKS NAME...: checks that FILE follows the rules of the Trace Event Format.

Prints problems, one per line, and exits with 1 if there are any. RANKS: the required number of processes. NAME: a
required slice or asynchronous event, `name@rank` for an event of that rank, `outer > name@rank` for a slice in another.
"""
import bisect
import json
import sys
from collections import defaultdict

problems = []


def wrong(message, event=None):
    problems.append(message + (f": {json.dumps(event)}" if event else ""))


def check_slices(slices):
    """Checks that the slices of a thread, in whole nanoseconds, are nested or disjoint."""
    open_until = []
    for start, end, event in slices:
        while open_until and open_until[-1] <= start:
            # A slice without a duration may stand at the very end of its parent.
            if open_until[-1] == start == end:
                break
            open_until.pop()
        if open_until and end > open_until[-1]:
            wrong("a slice that overlaps another one", event)
        open_until.append(end)


class Around:
    """Finds the slices of a thread around a time without a search through all slices."""

    def __init__(self, slices):
        """`slices` are sorted, parents before their children."""
        self.slices, self.starts, self.outer = slices, [start for start, _, _ in slices], []
        last = -1  # the last slice that has not ended
        for number, (start, _, _) in enumerate(slices):
            while last >= 0 and slices[last][1] < start:
                last = self.outer[last]
            self.outer.append(last)
            last = number

    def __call__(self, time):
        number = bisect.bisect_right(self.starts, time) - 1
        while number >= 0:
            if self.slices[number][1] >= time:
                yield self.slices[number][2]
            number = self.outer[number]


def check_arrows(flows, threads, around):
    """Checks that each arrow leads from a `call X` to the begin of an X, and that nearly all calls have an arrow; the
    last calls may have none."""
    calls = sum(event["name"].startswith("call ") for slices in threads.values() for _, _, event in slices)
    if len(flows) < 0.9 * calls - 8:
        wrong(f"{calls} calls, but only {len(flows)} arrows")
    by_start = {key: defaultdict(set) for key in threads}
    for key, slices in threads.items():
        for start, _, event in slices:
            by_start[key][start].add(event["name"])
    for flow, ends in flows.items():
        if set(ends) != {"s", "f"}:
            continue
        (left, out), (arrived, into) = ends["s"], ends["f"]
        called = {event["name"][5:] for event in around[out["pid"], out["tid"]](left)
                  if event["name"].startswith("call ")}
        begun = by_start[into["pid"], into["tid"]][arrived]
        if not called & begun:
            wrong(f"flow {flow} leads from a call of {called} to {begun}")


def main(path, ranks, names):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    trace = json.loads(text)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return wrong("not an object with traceEvents")
    events = trace["traceEvents"]
    if text.count("\n") != len(events) + 2:
        wrong("not an event a line")
    ns = lambda microseconds: round(microseconds * 1000)
    threads = defaultdict(list)
    processes, named_threads, seen = {}, {}, set()
    flows, asyncs = defaultdict(dict), defaultdict(list)
    first = None
    for number, event in enumerate(events):
        phase = event.get("ph")
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid"), int):
            wrong("an event without pid and tid", event)
            continue
        if phase == "M":
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                if event["tid"] in named_threads:
                    wrong("two threads of one number", event)
                named_threads[event["tid"]] = event["pid"]
            continue
        if not isinstance(event.get("ts"), (int, float)) or event["ts"] < 0:
            wrong("an event without a time", event)
            continue
        if not event.get("name"):
            wrong("an event without a name", event)
        if named_threads.get(event["tid"]) != event["pid"]:
            wrong("an event of a thread without a name", event)
        first = event["ts"] if first is None else min(first, event["ts"])
        start = ns(event["ts"])
        if phase == "X":
            if event.get("dur", -1) < 0:
                wrong("a slice without a duration", event)
            threads[event["pid"], event["tid"]].append((start, start + ns(event["dur"]), event))
            seen.add(event["name"])
            seen.add(f"{event['name']}@{event['pid']}")
        elif phase in "sf" and "id" in event:
            if phase in flows[event["id"]]:
                wrong("a flow with two starts or ends", event)
            if phase == "f" and event.get("bp") != "e":
                wrong("a flow's end that belongs to the next slice", event)
            flows[event["id"]][phase] = (start, event)
        elif phase in "be" and "id" in event:
            asyncs[event["cat"], event["id"], event["name"]].append((start, phase))
            seen.add(event["name"])
            seen.add(f"{event['name']}@{event['pid']}")
        else:
            wrong("an event of no known kind", event)
    if sorted(processes) != list(range(ranks)):
        wrong(f"processes {sorted(processes)}, not {ranks} of them")
    if len(set(processes.values())) != len(processes):
        wrong(f"two ranks with one role: {processes}")
    if events and first != 0:
        wrong(f"the first event is at {first}, not 0")
    for key, slices in threads.items():
        # Sort by time, like an importer. The file must have each parent before its children.
        slices.sort(key=lambda slice: slice[0])
        check_slices(slices)
        slices.sort(key=lambda slice: (slice[0], -slice[1]))
    around = defaultdict(lambda: Around([]), {key: Around(slices) for key, slices in threads.items()})
    for flow, ends in flows.items():
        if set(ends) != {"s", "f"}:
            wrong(f"flow {flow} has only one end")
            continue
        if ends["f"][0] < ends["s"][0]:
            wrong(f"flow {flow} ends {ends['s'][0] - ends['f'][0]} ns before it starts")
        for time, event in ends.values():
            if not any(True for _ in around[event["pid"], event["tid"]](time)):
                wrong("a flow's end outside of any slice", event)
    for key, slices in threads.items():
        for start, _, event in slices:
            seen.update(f"{outer['name']} > {event['name']}@{event['pid']}" for outer in around[key](start))
    check_arrows(flows, threads, around)
    for key, pair in asyncs.items():
        if [phase for _, phase in sorted(pair)] != ["b", "e"]:
            wrong(f"{key}: not one begin and one end")
    for name in names:
        if name not in seen:
            wrong(f"nothing is named {name}")
    print(f"{len(events)} events, {len(flows)} flows, {len(threads)} threads", file=sys.stderr)


main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
for problem in problems[:20]:
    print(problem)
sys.exit(bool(problems))
