# Sourced by scripts/web.sh: the tests of the package, in each browser.
browsers=(${EDA_WEB_BROWSERS:-chromium firefox})

[ -f web/dist/index.js ] || {
    echo "There is no build: run scripts/web.sh build first." >&2
    exit 1
}
for browser in "${browsers[@]}"; do
    case $browser in
    chromium) [ -n "${EDA_CHROMIUM:-}" ] || [ -x /usr/bin/chromium ] || [ -x /usr/bin/chromium-browser ] ||
        [ -x /usr/bin/google-chrome ] || need "Chromium" chromium ;;
    firefox) [ -n "${EDA_FIREFOX:-}" ] || [ -x /usr/bin/firefox-esr ] || [ -x /usr/bin/firefox ] ||
        need "Firefox with a software driver" firefox-esr mesa-vulkan-drivers libvulkan1 ;;
    esac
done
toolchain
bindgen
packages

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
step "all passed"
