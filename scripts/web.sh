#!/usr/bin/env bash
# The npm package in web/, the demo page made of it, and their tests.
#
#   scripts/web.sh build       web/dist: the WebAssembly module, its JavaScript and types, the shaders
#   scripts/web.sh site        web/page/dist: the demo page, static files (after a build)
#   scripts/web.sh page        the demo page's tests, in headless Chromium and Firefox (after a build)
#   scripts/web.sh test        all tests, in the same browsers (after a build)
#   scripts/web.sh             a build and all tests
#
# What is missing is installed: the target by `rustup target add`, wasm-bindgen by `cargo install`, the rest by npm; on
# Debian and Ubuntu node and the browsers by apt-get. EDA_WEB_TOOLCHAIN=debian takes Debian's own compiler
# (rustc-web) in place of rustup's target.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
tools=$target/web-tools
triple=wasm32-unknown-unknown
most=400000 # bytes of the module, gzipped

step() {
    printf '\n== web: %s (%d min %02d s)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60))
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "This needs root, and there is no sudo: $*" >&2
        return 1
    fi
}

# need WHAT PACKAGE...: installs packages that provide WHAT, or says what to install.
need() {
    local what=$1
    shift
    if command -v apt-get >/dev/null; then
        step "installing $what: $*"
        as_root apt-get update -qq
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    else
        echo "Missing: $what. On Debian it is in: $*. Install your system's equivalent and run this again." >&2
        exit 1
    fi
}

# Debian's compiler comes without the standard library for the target; it is built once, from its own sources.
debian_library=/usr/lib/rustlib/$triple/lib
debian_toolchain() {
    [ -x /usr/bin/rustc ] && [ -x /usr/bin/cargo ] && [ -d /usr/lib/rustlib/src/rust/library ] ||
        need "Debian's Rust for the browser" rustc-web cargo-web rust-web-src rust-web-llvm
    # The linker of an installed Rust, else Debian's.
    linker=$(find "$(rustc --print sysroot 2>/dev/null)" -name rust-lld -path '*rustlib*' 2>/dev/null | head -1)
    if [ -z "$linker" ]; then
        compgen -G '/usr/bin/wasm-ld-*' >/dev/null || need "a linker for WebAssembly" lld-22
        linker=$(compgen -G '/usr/bin/wasm-ld-*' | sort -V | tail -1)
    fi
    export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=$linker
    compgen -G "$debian_library/libstd-*.rlib" >/dev/null || {
        step "building the standard library for $triple"
        local at=$tools/empty
        mkdir -p "$at/src"
        printf '[package]\nname = "empty"\nedition = "2024"\n[workspace]\n' >"$at/Cargo.toml"
        : >"$at/src/lib.rs"
        (
            cd "$at"
            RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Cembed-bitcode=yes CARGO_TARGET_DIR=$at/target \
                /usr/bin/cargo build --quiet --release -Z build-std=std,panic_abort,test --target $triple
        )
        as_root mkdir -p "$debian_library"
        find "$at/target/$triple/release/deps" -name '*.rlib' ! -name 'libempty-*' |
            while read -r file; do as_root cp "$file" "$debian_library/"; done
    }
    export RUSTC=/usr/bin/rustc
    cargo=(/usr/bin/cargo)
}

toolchain() {
    cargo=(cargo)
    local sysroot
    sysroot=$(rustc --print sysroot 2>/dev/null || true)
    if [ -d "$sysroot/lib/rustlib/$triple/lib" ] && [ "$sysroot" != /usr ]; then
        return
    fi
    if [ "${EDA_WEB_TOOLCHAIN:-}" = debian ] || compgen -G "$debian_library/libstd-*.rlib" >/dev/null; then
        debian_toolchain
    elif command -v rustup >/dev/null; then
        rustup target add $triple
    else
        echo "Missing: the Rust target $triple. Install it with rustup (https://rustup.rs), or on Debian set EDA_WEB_TOOLCHAIN=debian." >&2
        exit 1
    fi
}

# The version of wasm-bindgen's tools has to be that of the library.
bindgen() {
    local version
    version=$(grep -A1 '^name = "wasm-bindgen"$' Cargo.lock | sed -n 's/^version = "\(.*\)"/\1/p')
    export PATH=$tools/bin:$PATH
    if [ "$(wasm-bindgen --version 2>/dev/null)" != "wasm-bindgen $version" ]; then
        step "installing wasm-bindgen $version"
        (
            # With the machine's own compiler.
            unset RUSTC CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER
            cargo install --quiet wasm-bindgen-cli --version "$version" --root "$tools" --target-dir "$tools/target"
        )
    fi
}

packages() {
    command -v node >/dev/null && command -v npm >/dev/null || need "node and npm" nodejs npm
    (cd web && npm install --no-audit --no-fund --silent)
}

build() {
    toolchain
    bindgen
    packages
    step "building the module"
    "${cargo[@]}" rustc --lib --crate-type cdylib --profile web --target $triple \
        --no-default-features --features web
    rm -rf web/dist
    mkdir -p web/dist/shaders
    wasm-bindgen --target web --out-dir web/dist "$target/$triple/web/eda_wgpu.wasm"
    web/node_modules/.bin/wasm-opt -Oz --enable-bulk-memory --enable-nontrapping-float-to-int --enable-sign-ext \
        --enable-mutable-globals --enable-reference-types --enable-multivalue \
        web/dist/eda_wgpu_bg.wasm -o web/dist/eda_wgpu_bg.wasm
    cp web/src/index.js web/src/index.d.ts web/dist/
    cp shaders/*.wgsl web/dist/shaders/
    cp LICENSE-MIT LICENSE-APACHE web/
    local module scripts
    module=$(gzip -9c web/dist/eda_wgpu_bg.wasm | wc -c)
    scripts=$(cat web/dist/index.js web/dist/eda_wgpu.js | gzip -9c | wc -c)
    echo "web/dist/eda_wgpu_bg.wasm: $(wc -c <web/dist/eda_wgpu_bg.wasm) bytes, $module gzipped (at most $most); its JavaScript: $scripts gzipped"
    [ "$module" -le $most ] || {
        echo "The module is too large." >&2
        exit 1
    }
}

site() {
    packages
    step "the demo page"
    [ -f web/dist/index.js ] || {
        echo "There is no build: run scripts/web.sh build first." >&2
        exit 1
    }
    (cd web && npm run --silent types && npm run --silent site -- --logLevel warn)
    echo "web/page/dist: $(du -sh web/page/dist | cut -f1), of which inputs and results are loaded where they are looked at"
}

# Where the command line is built too, times are compared with its own.
page_tests() {
    site
    for browser in ${EDA_WEB_BROWSERS:-chromium firefox}; do
        step "the demo page in $browser"
        EDA_NATIVE=${EDA_NATIVE:-$target/release/eda} node web/tests/page.mjs "$browser"
    done
}

case ${1:-all} in
build) build ;;
site) site ;;
page) page_tests ;;
test)
    . scripts/web-test.sh
    page_tests
    ;;
all)
    build
    . scripts/web-test.sh
    page_tests
    ;;
*)
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
