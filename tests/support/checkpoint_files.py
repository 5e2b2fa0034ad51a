"""Reads the files of a checkpoint, to compare two runs."""

import glob
import os


def newest_checkpoint(folder):
    """Returns the name of the newest checkpoint in the folder, or None, and the content of its files. Leaves out the
    manifest, which contains the run id."""
    newest = sorted(glob.glob(folder + "/step-*"))
    if not newest:
        return None, {}
    files = {}
    for path in sorted(glob.glob(newest[-1] + "/*.safetensors")):
        with open(path, "rb") as file:
            files[os.path.basename(path)] = file.read()
    return os.path.basename(newest[-1]), files
