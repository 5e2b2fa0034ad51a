# What the scripts of tests/python share, beside tests/cli/lib.bash, which it sources. It puts what
# requirements.txt names into .deps/python; $python is the interpreter there.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "${BASH_SOURCE[0]}")/../cli/lib.bash"
# shellcheck disable=SC2034  # of lib.bash
limit=300

# In a way that it is there whole or not at all, once for all scripts that run at the same time.
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
