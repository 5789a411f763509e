#!/usr/bin/env bash
# Every check of this repository: format, lints, tests, documentation, benches, the shaders in a second
# WGSL compiler, the package. Installs what is missing on Debian and Ubuntu; says what is missing elsewhere.
#
#   scripts/test.sh            all of it (about 25 minutes on two cores once the tools are there)
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

. scripts/common.sh

have_vulkan() {
    # The loader, and a driver's manifest where the loader looks for one.
    [[ $(PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null) == *libvulkan.so.1* ]] && {
        [ -n "${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}" ] ||
            compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null ||
            compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null
    }
}

if [ "$(uname -s)" = Linux ] && ! have_vulkan; then
    need "a Vulkan driver (the software driver lavapipe)" libvulkan1 mesa-vulkan-drivers
fi
need_node
for component in rustfmt clippy; do
    if ! cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1; then
        command -v rustup >/dev/null || {
            echo "Missing: $component for $(cargo --version)." >&2
            exit 1
        }
        rustup component add "$component"
    fi
done

step "format"
cargo fmt --check

step "lints"
cargo clippy --release --all-targets -- -D warnings

step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --release --no-deps

step "tests"
cargo test --release

step "matrix tier"
# On a driver of this machine that has cooperative matrices, or on one that is fetched for the purpose.
if cargo run --release --quiet -- adapters --json | grep -q '"matrix"'; then
    cargo test --release --test matrix -- --ignored
elif [ "$(uname -s)" = Linux ]; then
    scripts/matrix_driver.sh "$target/matrix-driver"
    host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
    env "CARGO_TARGET_${host}_RUNNER=$(cd "$target/matrix-driver" && pwd)/run" \
        cargo test --release --test matrix -- --ignored
else
    echo "No adapter with cooperative matrices here; they are tested on Linux." >&2
    exit 1
fi

step "shaders in Tint"
cargo run --release --example shaders -- "$target/shaders"
(cd tests/tint && npm install --no-audit --no-fund --silent)
node tests/tint/check.mjs "$target/shaders"

step "benches, a short run"
cargo bench -- --quick

step "browser build, package and tests"
scripts/web.sh

step "package"
cargo package --allow-dirty --no-verify
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
crate=$target/package/eda-wgpu-$version
size=$(wc -c <"$crate.crate")
[ "$size" -lt 10000000 ] || {
    echo "$crate.crate has $size bytes, more than a registry takes" >&2
    exit 1
}
# The package builds from what is in it. In this target directory the dependencies are built already.
rm -rf "$crate"
tar -xzf "$crate.crate" -C "$target/package"
cargo check --release --manifest-path "$crate/Cargo.toml" --target-dir "$target"

step "all checks passed"
