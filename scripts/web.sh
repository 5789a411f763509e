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
mkdir -p "${CARGO_TARGET_DIR:-target}"
target=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)
tools=$target/web-tools
triple=wasm32-unknown-unknown
most=400000 # bytes of the module, gzipped
browsers=(${EDA_WEB_BROWSERS:-chromium firefox})

. scripts/common.sh
scope="web: "

# Debian's compiler comes without the standard library for the target; it is built once, from its own sources.
debian_library=/usr/lib/rustlib/$triple/lib
debian_toolchain() {
    [ -x /usr/bin/rustc ] && [ -x /usr/bin/cargo-clippy ] && [ -d /usr/lib/rustlib/src/rust/library ] ||
        need "Debian's Rust for the browser" rustc-web cargo-web rust-web-clippy rust-web-src rust-web-llvm
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
    need_node
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

built() {
    [ -f web/dist/index.js ] || {
        echo "There is no build: run scripts/web.sh build first." >&2
        exit 1
    }
}

site() {
    built
    packages
    step "the demo page"
    (cd web && npm run --silent types && npm run --silent site -- --logLevel warn)
    echo "web/page/dist: $(du -sh web/page/dist | cut -f1), of which inputs and results are loaded where they are looked at"
}

install_browsers() {
    for browser in "${browsers[@]}"; do
        case $browser in
        chromium) [ -n "${EDA_CHROMIUM:-}" ] || [ -x /usr/bin/chromium ] || [ -x /usr/bin/chromium-browser ] ||
            [ -x /usr/bin/google-chrome ] || need "Chromium" chromium ;;
        firefox) [ -n "${EDA_FIREFOX:-}" ] || [ -x /usr/bin/firefox-esr ] || [ -x /usr/bin/firefox ] ||
            need "Firefox with a software driver" firefox-esr mesa-vulkan-drivers libvulkan1 ;;
        esac
    done
}

package_tests() {
    built
    toolchain
    bindgen
    packages
    install_browsers
    step "lints"
    # Cargo takes the first clippy that it finds: that of the same toolchain.
    PATH="$(dirname "$(command -v "${cargo[0]}")"):$PATH" "${cargo[@]}" clippy --lib --target $triple \
        --no-default-features --features web -- -D warnings
    step "the package as npm packs it, types, a Vite build"
    (
        cd web
        rm -rf tests/vite/node_modules
        tarball=$(npm pack --silent)
        npm install --no-save --no-audit --no-fund --silent --prefix tests/vite "./$tarball"
        rm "$tarball"
        node_modules/.bin/tsc --noEmit --strict --target es2022 --lib es2022,dom --module nodenext \
            --moduleResolution nodenext --skipLibCheck false tests/vite/types.ts
        (cd tests/vite && ../../node_modules/.bin/vite build --logLevel warn)
    )

    for browser in "${browsers[@]}"; do
        step "golden cases through WebGPU in $browser"
        EDA_WEB_BROWSER=$browser CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUNNER="node $PWD/web/tests/runner.mjs" \
            "${cargo[@]}" test --profile web --target $triple --no-default-features --features file --test web
        step "the package in $browser"
        node web/tests/run.mjs "$browser"
    done
}

# Where the command line is built too, times are compared with its own.
page_tests() {
    site
    install_browsers
    for browser in "${browsers[@]}"; do
        step "the demo page in $browser"
        EDA_NATIVE=${EDA_NATIVE:-$target/release/eda} node web/tests/page.mjs "$browser"
    done
}

case ${1:-all} in
build) build ;;
site) site ;;
page) page_tests ;;
test)
    package_tests
    page_tests
    ;;
all)
    build
    package_tests
    page_tests
    ;;
*)
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
