#!/bin/sh
# Builds llama-server from the MIT llama.cpp sources inside the sdist of llama-cpp-python; nothing else of it is used.
#   build_llama_server.sh [FOLDER]      default: ~/.cache/fabrictool/llama-server
# The last line on stdout is the path of the program. A second call finds it built. LLAMA_CPP_PYTHON_SDIST may name an
# sdist that is already here; PYTHON the interpreter whose pip downloads it.
set -eu

folder=${1:-"${XDG_CACHE_HOME:-$HOME/.cache}/fabrictool/llama-server"}
python=${PYTHON:-python3}
program="$folder/llama-server"

if [ -x "$program" ]; then
    echo "$program"
    exit 0
fi

missing=""
for tool in cmake g++ make tar; do
    command -v "$tool" >/dev/null 2>&1 || missing="$missing $tool"
done
if [ -n "$missing" ]; then
    echo "missing:$missing (Debian packages: cmake g++ make tar)" >&2
    exit 1
fi

mkdir -p "$folder"
sdist=${LLAMA_CPP_PYTHON_SDIST:-}
if [ -z "$sdist" ]; then
    # pip reads an sdist's metadata even when told to fetch it only, so this unpacks it once for nothing.
    "$python" -m pip download --quiet --no-deps --no-binary :all: --dest "$folder/download" llama-cpp-python >&2
    sdist=$(ls "$folder"/download/llama_cpp_python-*.tar.gz | tail -n 1)
fi
rm -rf "$folder/source"
mkdir "$folder/source"
tar -xzf "$sdist" -C "$folder/source" --strip-components=1
source="$folder/source/vendor/llama.cpp"

# GGML_NATIVE stays on: the program runs on the machine that built it. No curl, TLS or web UI: it serves a local file on
# loopback.
cmake -S "$source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DGGML_CCACHE=OFF >&2
nice -n 19 cmake --build "$folder/build" --target llama-server -j 2 >&2
cp "$folder/build/bin/llama-server" "$program.new"
mv "$program.new" "$program"
rm -rf "$folder/source" "$folder/build" "$folder/download"
echo "$program"
