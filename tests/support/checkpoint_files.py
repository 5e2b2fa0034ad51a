"""Reads the files of a checkpoint, to compare two runs."""

import glob
import json
import os


def in_order(part):
    """Returns the tensors of a file of tables. The rows of a table, which are in the order in which they were first
    looked up, are put in the order of their ids."""
    begin = 8 + int.from_bytes(part[:8], "little")
    header = json.loads(part[8:begin])
    tensors = {name: part[begin + of["data_offsets"][0] : begin + of["data_offsets"][1]] for name, of in header.items()}
    found = {}
    for name, rows in tensors.items():
        table, number = name.split(".")[0], name.split(".")[-1]
        ids = tensors[f"{table}.ids.{number}"]
        count = len(ids) // 8
        width = len(rows) // max(count, 1)
        order = sorted(range(count), key=lambda row: ids[8 * row : 8 * row + 8])
        found[name] = b"".join(rows[width * row : width * row + width] for row in order)
    return found


def newest_checkpoint(folder):
    """Returns the name of the newest checkpoint in the folder, or None, and the content of its files. Leaves out the
    manifest, which contains the run id."""
    newest = sorted(glob.glob(folder + "/step-*"))
    if not newest:
        return None, {}
    files = {}
    for path in sorted(glob.glob(newest[-1] + "/*.safetensors")):
        with open(path, "rb") as file:
            name = os.path.basename(path)
            files[name] = in_order(file.read()) if name.startswith("table-") else file.read()
    return os.path.basename(newest[-1]), files
