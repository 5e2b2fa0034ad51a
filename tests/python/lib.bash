# Common functions of the scripts of tests/python; it sources tests/cli/lib.bash. It installs requirements.txt
# into .deps/python and sets $python to the interpreter there.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "${BASH_SOURCE[0]}")/../cli/lib.bash"
# shellcheck disable=SC2034  # of lib.bash
limit=300

# The lock makes concurrent scripts install only once. The copy of requirements.txt marks a complete installation.
install_python() {
  local requirements=$root/tests/python/requirements.txt folder=$root/.deps/python
  python=$folder/bin/python
  mkdir -p "$root/.deps"
  (
    flock 9
    cmp -s "$requirements" "$folder/requirements.txt" && exit
    [[ -x $python ]] || python3 -m venv "$folder" || exit
    "$python" -m pip install -q -r "$requirements" || exit
    cp "$requirements" "$folder/requirements.txt"
  ) 9>"$root/.deps/python.lock" || {
    echo "FAILED: Python's packages could not be installed"
    exit 1
  }
}
install_python
