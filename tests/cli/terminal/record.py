"""Records what people see of each job on terminals of 80 and 40 columns, and compares it with what is kept here.

    python3 tests/cli/terminal/record.py DISTRAIN [--update] [SESSION...]

A session is a file NAME.COLUMNS.txt: the screens of tmux at the moments that the script below names, with figures and
times masked. Each wait is for a text on the screen. `--update` writes the files anew.
"""
import concurrent.futures, os, pathlib, re, shutil, socket, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).parent
limit = float(os.environ.get("DISTRAIN_TEST_LIMIT", 60))
hybrid = "distrain hybrid --trainers 1 --batches-per-epoch 2 --log-interval 0"
slow = "distrain hybrid --trainers 1 --epochs 3 --batches-per-epoch 300 --log-interval 0 --inject delay=50ms"
ps = "distrain ps --data images --batch-size 10 --log-interval 1 --epochs 2"
pipeline = "distrain pipeline --model resnet18 --image-size 32 --batch-size 4 --batches 2 --log-interval 0"

# What is done in a session: a command line, `wait:` for a text (a pattern), a `key:`, `shot:` a screen,
# `kill:` a rank of the job whose lines are in `out`.
sessions = {
    "hybrid-file": [f"{hybrid} --epochs 3 > out", "wait:done:.*", "shot:"],
    "hybrid-null-local": [f"{hybrid} --epochs 2 --local > /dev/null", "wait:done:.*", "shot:"],
    "hybrid-bar": [f"{slow} > out", "wait: %  .*/s  .*<|^epoch.*loss .{6}$", "shot:", "key:C-c",
                   "wait:nothing saved.*", "shot:"],
    "hybrid-background": [f"{hybrid} --epochs 3 > out &", "wait:\\[1\\]", "wait; echo over", "wait:^over", "shot:"],
    "hybrid-terminal": [f"{hybrid} --epochs 1", "wait:hint:.*", "shot:"],
    "hybrid-dumb": [f"TERM=dumb {hybrid} --epochs 2 > out", "wait:done:.*", "shot:"],
    "hybrid-threads": [f"{hybrid} --epochs 1 --threads $(($(nproc) + 1)) > out", "wait:done:.*", "shot:"],
    "hybrid-interrupted": [f"{slow} --checkpoint 'my runs' > out", "wait:loss", "key:C-c", "wait:to go on(.|\n)*auto",
                           "shot:"],
    "ps-jq": [f"{ps} --mode sync | jq -c .event > out", "wait:done:.*", "shot:"],
    "ps-lost": ["distrain ps --data images --batch-size 1 --epochs 50 --inject delay=100ms > out", "wait:loss", "kill:2",
                "wait:/s  .*<.*\n.*lost at|^ *\\d+ %  \\d+/.*\n.*lost trainer2", "shot:", "key:C-c",
                "wait:nothing saved.*", "shot:"],
    "ps-waiting": ["distrain ps --data images --rank 0 --master-port $port > out", "wait:waiting for ranks", "shot:",
                   "key:C-c", "wait:nothing saved.*", "shot:"],
    "rnn-pretty": ["distrain rnn --pretty --epochs 2 --log-interval 0", "wait:done:.*", "shot:"],
    "rnn-pretty-pipe": ["distrain rnn --pretty --epochs 2 --log-interval 0 | cat", "wait:done:.*", "shot:"],
    "rl-file": ["distrain rl --max-episodes 2 > out", "wait:distrain: .*", "shot:"],
    "pipeline-file": [f"{pipeline} --num-split 1,2 > out", "wait:done:.*", "shot:"],
}

masks = [
    (r"\{\"v\":.*\}", "{JSON}"),
    (r"(\{JSON\}\s*)+", "{JSON}\n"),
    (r"run [0-9a-f]{8}", "run RUN"),
    (r"\[[#.]+\]", "[BAR]"),
    (r"\d+:\d\d(:\d\d)?(<\d+(:\d\d)+)?", "TIME"),
    (r"\d+: this process may use \d+ CPUs?", "N: this process may use N CPUs"),
    (r"\[1\] \d+", "[1] PID"),
    (r"\d+(\.\d+)?/s", "RATE"),
    (r"\d+ %|\d+\.\d+ %", "PERCENT"),
    (r"\(\d+ s\)", "(SECONDS)"),
    (r"(localhost:|port[ =])\d+", r"\1PORT"),
    (r"step-\d+", "step-STEP"),
    (r"\b\d+/\d{3,}", "MADE/ALL"),
    (r"\d+ steps? (?=in|go)", "N steps "),
    (r"(step|trainer\d) \d+", r"\1 N"),
    (r"\(rank 2 .*?\); ", "(CAUSE); "),
    (r"-?\d+\.\d+", "FIGURE"),
]


def masked(screen):
    for pattern, by in masks:
        screen = re.sub(pattern, by, screen)
    lines = [line.rstrip() for line in screen.rstrip().split("\n")]
    return "\n".join(lines) + "\n"


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


class Session:
    def __init__(self, server, name, columns, folder, distrain):
        self.name, self.columns, self.folder = name, columns, folder / f"{name}.{columns}"
        self.base, self.target = ["tmux", "-S", str(server)], f"{name}_{columns}"
        shutil.copytree(folder / "images", self.folder / "images")
        shell = (f"cd '{self.folder}' && exec env -u RANK -u WORLD_SIZE -u NO_COLOR PS1='$ ' TERM=screen "
                 f"port={free_port()} PATH=\"{folder}/bin:$PATH\" bash --norc --noprofile")
        self.tmux("new-session", "-d", "-s", self.target, "-x", str(columns), "-y", "40", shell)

    def tmux(self, *args):
        return subprocess.run([*self.base, *args], check=True, capture_output=True, text=True).stdout

    def screen(self):
        return self.tmux("capture-pane", "-p", "-J", "-S", "-", "-t", self.target)

    def wait(self, pattern):
        deadline = time.monotonic() + limit
        while not re.search(pattern, screen := self.screen(), re.M):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}, {self.columns} columns: no '{pattern}' after {limit:.0f} s:\n{screen}")
            time.sleep(0.05)
        return screen

    def run(self, actions):
        shots = []
        self.wait(r"^\$ ")
        for action in actions:
            what, _, rest = action.partition(":")
            if what == "wait":
                self.wait(rest)
                if rest.startswith(("done", "nothing", "hint", "to go on", "distrain:")):
                    self.wait(r"\n\$ *\n*$")
            elif what == "key":
                self.tmux("send-keys", "-t", self.target, rest)
            elif what == "shot":
                shots.append(masked(self.screen()))
            elif what == "kill":
                line = f"kill -9 $(jq -r 'select(.event == \"start\" and .rank == {rest}).pid' out)"
                subprocess.run(["bash", "-c", line], cwd=self.folder, check=True)
            else:
                self.tmux("send-keys", "-t", self.target, "-l", action)
                self.tmux("send-keys", "-t", self.target, "Enter")
        return ("-" * self.columns + "\n").join(shots)


def main():
    args = [each for each in sys.argv[1:] if each != "--update"]
    update = "--update" in sys.argv
    distrain, names = os.path.realpath(args[0]), args[1:] or list(sessions)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "bin").mkdir()
        (folder / "bin/distrain").symlink_to(distrain)
        images = f"source '{here.parent}/lib.bash' /bin/true; make_images '{folder}/images' 200 20"
        subprocess.run(["bash", "-c", images], check=True)
        server = folder / "tmux"
        subprocess.run(["tmux", "-S", str(server), "-f", "/dev/null", "new-session", "-d", "-s", "first", "sleep 1000"],
                       check=True)

        def record(job):
            name, columns = job
            return Session(server, name, columns, folder, distrain).run(sessions[name])

        failures = 0
        jobs = [(name, columns) for name in names for columns in (80, 40)]
        try:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                for (name, columns), future in [(job, pool.submit(record, job)) for job in jobs]:
                    file = here / f"{name}.{columns}.txt"
                    try:
                        seen = future.result()
                    except (RuntimeError, subprocess.CalledProcessError) as error:
                        failures += 1
                        print("FAILED:", error)
                        continue
                    if update:
                        file.write_text(seen)
                    elif not file.exists() or file.read_text() != seen:
                        failures += 1
                        print(f"FAILED: {file.name} shows\n{file.read_text() if file.exists() else ''}"
                              f"but this run shows\n{seen}")
        finally:
            subprocess.run(["tmux", "-S", str(server), "kill-server"])
    sys.exit(failures > 0)


main()
