#!/usr/bin/env bash
# A software Vulkan driver with cooperative matrices (Mesa's lavapipe, 26 or newer) in a folder of its own, nothing
# installed: for the tests of the matrix tier on machines whose own driver has none. Debian only, about 100 MB.
#
#   scripts/matrix_driver.sh DIR     fetches it and writes DIR/run
#   DIR/run PROGRAM [ARG ...]        runs a program on it
set -euo pipefail
mkdir -p "$1"
dir=$(cd "$1" && pwd)
[ ! -x "$dir/run" ] || exit 0

# Wherever this system gets Debian from has the unstable distribution too.
mirror=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null | grep '/debian/*$' | head -1 || true)
[ -n "$mirror" ] || mirror=$(awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /\/debian\/*$/) { print $i; exit } }' \
    /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true)
[ -n "$mirror" ] || {
    echo "No Debian archive among this system's package sources, so no driver with cooperative matrices." >&2
    exit 1
}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mkdir -p "$dir"/{state/lists/partial,cache/archives/partial,root}
: >"$dir/status"
echo "deb [signed-by=$keyring] $mirror sid main" >"$dir/sources.list"
apt=(apt-get
    -o "Dir::Etc::sourcelist=$dir/sources.list" -o Dir::Etc::sourceparts=-
    -o "Dir::State=$dir/state" -o "Dir::State::Lists=$dir/state/lists" -o "Dir::State::status=$dir/status"
    -o "Dir::Cache=$dir/cache")
"${apt[@]}" -qq update
"${apt[@]}" -qq install -y --no-install-recommends --download-only \
    mesa-vulkan-drivers libvulkan1 libc6 >/dev/null
for package in "$dir"/cache/archives/*.deb; do
    dpkg -x "$package" "$dir/root"
done
rm -rf "$dir/cache" "$dir/state"
lib=$dir/root/usr/lib/$(uname -m)-linux-gnu
icd=$dir/lvp.json
printf '{"ICD":{"api_version":"1.4.305","library_path":"%s"},"file_format_version":"1.0.1"}\n' \
    "$lib/libvulkan_lvp.so" >"$icd"
# The driver needs its own C library, which only its own loader starts.
loader=$(find "$lib" -maxdepth 1 -name 'ld-linux-*.so.*' | head -1)
cat >"$dir/run.tmp" <<RUN
#!/usr/bin/env bash
export VK_DRIVER_FILES=$icd XDG_RUNTIME_DIR=\${XDG_RUNTIME_DIR:-/tmp}
exec $loader --library-path $lib "\$@"
RUN
chmod +x "$dir/run.tmp"
mv "$dir/run.tmp" "$dir/run"
