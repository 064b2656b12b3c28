# Compares a release with its manifest; argument: its name. Prints `whole`, `absent`, or `damaged` and files that differ.
r=$base/env/rel/$1
if [ ! -d "$r" ]; then echo absent; exit 0; fi
cd "$r" || exit 1
if [ "$(sha256sum <MANIFEST 2>/dev/null | cut -c1-16)" != "$1" ]; then echo damaged; echo "MANIFEST"; exit 0; fi
said=$(LC_ALL=C sha256sum -c MANIFEST 2>/dev/null)
if [ $? -eq 0 ]; then echo whole; exit 0; fi
echo damaged
printf '%s\n' "$said" | sed -n 's/: FAILED.*//p' | head -n 20
