# Sourced by scripts here: interpreters of other versions, and environments of them.

# python_of VERSION: prints an interpreter of that version, from the path or pyenv; nothing if there is none.
python_of() {
  local candidate
  for candidate in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null || continue
    "$candidate" -c 'import sys; print(sys.executable)'
    return
  done
}

# other_pythons: prints the supported versions but the one of `python3`, which has the whole suite anyway.
other_pythons() {
  python3 -c 'import sys; print(*(f"3.{n}" for n in range(10, 14) if n != sys.version_info[1]))'
}

# new_environment DIRECTORY PYTHON ARGUMENT...: a new one, with what the arguments of `uv pip install` say. uv unpacks
# a wheel once for all environments; pip does so for each, and torch's take 5 GB. The script has made "$work".
new_environment() {
  if [ ! -x "$work/tools/bin/uv" ]; then
    python3 -m venv "$work/tools"
    "$work/tools/bin/pip" install --quiet uv
  fi
  "$work/tools/bin/uv" venv --quiet --python "$2" "$1"
  "$work/tools/bin/uv" pip install --quiet --python "$1/bin/python" "${@:3}"
}
